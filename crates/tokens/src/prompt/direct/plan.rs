//! Compiled templates: steps write text, and terms have values.

use minijinja::Value;
use minijinja::machinery::ast::{BinOpKind, CompareOpKind};

/// Index of a variable in the table of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VariableSlot(u16);

impl VariableSlot {
    pub(super) fn new(at: usize) -> Self {
        Self(at as u16)
    }

    pub(super) fn at(self) -> usize {
        usize::from(self.0)
    }
}

/// Step of a template.
pub(super) enum PlanStep {
    Raw(Box<str>),
    /// Writes one value.
    Emit(PlanTerm),
    /// Writes the operands of `+`, which must be texts.
    Texts(Vec<PlanTerm>),
    /// Writes the operands of `~`, which are converted to texts.
    Joined(Vec<PlanTerm>),
    If {
        test: PlanTerm,
        then: Vec<PlanStep>,
        otherwise: Vec<PlanStep>,
    },
    For(Box<LoopStep>),
    Set(VariableSlot, PlanTerm),
    SetField(VariableSlot, Box<str>, PlanTerm),
    Break,
    Continue,
    Nothing,
    Unknown,
}

/// A loop.
pub(super) struct LoopStep {
    pub(super) target: VariableSlot,
    pub(super) counter: VariableSlot,
    pub(super) over: PlanTerm,
    pub(super) body: Vec<PlanStep>,
    pub(super) otherwise: Vec<PlanStep>,
    /// Variables that are assigned in the body. They have their previous values after each
    /// iteration.
    pub(super) own: Vec<VariableSlot>,
}

/// An expression, which has a value.
pub(super) enum PlanTerm {
    Text(Box<str>),
    Int(i64),
    Bool(bool),
    None,
    Var(VariableSlot),
    Field(Box<PlanTerm>, Box<str>),
    Item(Box<PlanTerm>, Box<PlanTerm>),
    /// Slice with a start and an end.
    Slice(Box<PlanTerm>, Option<Box<PlanTerm>>, Option<Box<PlanTerm>>),
    Backwards(Box<PlanTerm>),
    Not(Box<PlanTerm>),
    And(Box<(PlanTerm, PlanTerm)>),
    Or(Box<(PlanTerm, PlanTerm)>),
    Compare(CompareOpKind, Box<(PlanTerm, PlanTerm)>),
    /// `+`, `-` or `%`.
    Arithmetic(BinOpKind, Box<(PlanTerm, PlanTerm)>),
    Joined(Vec<PlanTerm>),
    Call(usize, Vec<(VariableSlot, PlanTerm)>),
    If(Box<(PlanTerm, PlanTerm, PlanTerm)>),
    Filtered(Box<PlanTerm>, KnownFilter),
    Is(Box<PlanTerm>, ValueTest),
    Method(Box<PlanTerm>, StringMethod, Vec<PlanTerm>),
    List(Vec<PlanTerm>),
    Namespace(Vec<(Box<str>, PlanTerm)>),
    Now(Box<PlanTerm>),
    Unknown,
}

/// Supported filter.
pub(super) enum KnownFilter {
    Trim,
    Length,
    First,
    Last,
    /// Returns a text unchanged: `string` or `safe`.
    Identity,
    Default(Box<PlanTerm>),
    Replace(Box<(PlanTerm, PlanTerm)>),
    Json(Vec<(Box<str>, Value)>),
}

/// Supported test of a value.
#[derive(Clone, Copy)]
pub(super) enum ValueTest {
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
pub(super) enum StringMethod {
    Strip,
    LStrip,
    RStrip,
    StartsWith,
    EndsWith,
    Split,
    Replace,
    Get,
}

/// Compiled template.
pub(super) struct RenderPlan {
    pub(super) steps: Vec<PlanStep>,
    /// Names of the slots.
    pub(super) names: Vec<Box<str>>,
    pub(super) macros: Vec<PlanMacro>,
}

/// Compiled macro.
pub(super) struct PlanMacro {
    pub(super) name: Box<str>,
    /// Parameters with their defaults.
    pub(super) parameters: Vec<(VariableSlot, Option<PlanTerm>)>,
    /// `None` if the body uses a variable of the template, which is not supported.
    pub(super) body: Option<Vec<PlanStep>>,
    /// Assigned variables, without parameters.
    pub(super) sets: Vec<VariableSlot>,
    /// Variables that may be read before they are assigned in the macro.
    pub(super) free: Vec<VariableSlot>,
    /// All variables whose names occur in the macro, without parameters.
    pub(super) named: Vec<VariableSlot>,
}
