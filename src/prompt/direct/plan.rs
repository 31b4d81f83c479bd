//! What compilation makes of a template: steps that write, terms that have a value.

use minijinja::Value;

/// Place of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot(u16);

impl Slot {
    pub(super) fn new(at: usize) -> Self {
        Self(at as u16)
    }

    pub(super) fn at(self) -> usize {
        usize::from(self.0)
    }
}

/// What a template does.
pub(super) enum Step {
    Raw(Box<str>),
    /// One value, however it prints.
    Emit(Term),
    /// Texts one after another.
    Texts(Vec<Term>),
    /// Values one after another, as texts.
    Joined(Vec<Term>),
    If {
        test: Term,
        then: Vec<Step>,
        otherwise: Vec<Step>,
    },
    For(Box<For>),
    Set(Slot, Term),
    SetField(Slot, Box<str>, Term),
    Break,
    Continue,
    Nothing,
    Unknown,
}

/// A loop.
pub(super) struct For {
    pub(super) target: Slot,
    pub(super) counter: Slot,
    pub(super) over: Term,
    pub(super) body: Vec<Step>,
    pub(super) otherwise: Vec<Step>,
    /// What is set within an iteration ends with it.
    pub(super) own: Vec<Slot>,
}

/// What has a value.
pub(super) enum Term {
    Text(Box<str>),
    Int(i64),
    Bool(bool),
    None,
    Var(Slot),
    Field(Box<Term>, Box<str>),
    Item(Box<Term>, Box<Term>),
    /// Without the first so many, or without the last.
    Slice(Box<Term>, Option<Box<Term>>, Option<Box<Term>>),
    Backwards(Box<Term>),
    Not(Box<Term>),
    And(Box<(Term, Term)>),
    Or(Box<(Term, Term)>),
    Compare(Comparison, Box<(Term, Term)>),
    Arithmetic(Operation, Box<(Term, Term)>),
    Joined(Vec<Term>),
    Call(usize, Vec<(Slot, Term)>),
    If(Box<(Term, Term, Term)>),
    Filtered(Box<Term>, Known),
    Is(Box<Term>, Kind),
    Method(Box<Term>, Method, Vec<Term>),
    List(Vec<Term>),
    Space(Vec<(Box<str>, Term)>),
    Now(Box<Term>),
    Unknown,
}

#[derive(Clone, Copy)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Lte,
    Gt,
    Gte,
    In,
    NotIn,
}

#[derive(Clone, Copy)]
pub(super) enum Operation {
    Add,
    Sub,
    Rem,
}

/// A filter.
pub(super) enum Known {
    Trim,
    Length,
    First,
    Last,
    Same,
    Default(Box<Term>),
    Replace(Box<(Term, Term)>),
    Json(Vec<(Box<str>, Value)>),
}

/// What a test asks.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Defined,
    Undefined,
    None,
    Text,
    Mapping,
    Iterable,
    True,
    False,
}

#[derive(Clone, Copy)]
pub(super) enum Method {
    Strip,
    LStrip,
    RStrip,
    StartsWith,
    EndsWith,
    Split,
    Replace,
    Get,
}

/// A template in steps.
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    /// Of the slots.
    pub(super) names: Vec<Box<str>>,
    pub(super) macros: Vec<Macro>,
}

/// A macro.
pub(super) struct Macro {
    pub(super) name: Box<str>,
    /// With what they are where a call does not say.
    pub(super) parameters: Vec<(Slot, Option<Term>)>,
    /// Nothing where it cannot be known what the body sees.
    pub(super) body: Option<Vec<Step>>,
    /// What it sets beside its parameters.
    pub(super) sets: Vec<Slot>,
    /// What it reads that it may not have set.
    pub(super) free: Vec<Slot>,
    /// All that it names beside its parameters.
    pub(super) named: Vec<Slot>,
}
