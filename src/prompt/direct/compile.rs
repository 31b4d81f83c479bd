//! From the syntax tree to steps: names become slots, texts one after another become pieces of output, and whatever is not
//! known becomes [`Term::Unknown`], which is only a loss if it is reached.

use minijinja::Value;
use minijinja::machinery::ast::{
    self, BinOp, BinOpKind, Call, CallArg, CompareOpKind, Expr, Filter, ForLoop, Set, Slice, Stmt,
    Test, UnaryOpKind,
};
use minijinja::value::ValueKind;

use super::plan::{Comparison, For, Kind, Known, Macro, Method, Operation, Plan, Slot, Step, Term};

/// Names that are functions wherever no variable has them.
const FUNCTIONS: [&str; 8] = [
    "caller",
    "debug",
    "dict",
    "namespace",
    "raise_exception",
    "range",
    "self",
    "strftime_now",
];

pub(super) fn is_function(name: &str) -> bool {
    FUNCTIONS.contains(&name)
}

/// The steps of a template.
pub(super) fn template(tree: &Stmt<'_>) -> Plan {
    let mut compiler = Compiler::default();
    let steps = match tree {
        Stmt::Template(node) => compiler.steps(&node.children),
        _ => vec![Step::Unknown],
    };
    let Compiler {
        names,
        mut macros,
        assigned,
        ..
    } = compiler;
    for known in &mut macros {
        // Of what a template has set by then, how much a macro sees is more than is followed here.
        if known
            .free
            .iter()
            .chain(&known.sets)
            .any(|slot| assigned.contains(slot))
        {
            known.body = None;
        }
    }
    Plan {
        steps,
        names,
        macros,
    }
}

#[derive(Default)]
struct Compiler {
    names: Vec<Box<str>>,
    macros: Vec<Macro>,
    /// Names of macros that are not followed.
    opaque: Vec<Box<str>>,
    /// For each loop that is open, what is set in it.
    open: Vec<Vec<Slot>>,
    /// Statements around the one at hand.
    depth: usize,
    /// What is set outside macros.
    assigned: Vec<Slot>,
    /// The macro at hand.
    inside: Option<Inside>,
}

/// What is found out about a macro.
#[derive(Default)]
struct Inside {
    parameters: Vec<Slot>,
    sets: Vec<Slot>,
    /// What it reads that it may not have set.
    free: Vec<Slot>,
    /// All that it names.
    named: Vec<Slot>,
}

impl Compiler {
    fn slot(&mut self, name: &str) -> Slot {
        let known = self.names.iter().position(|known| **known == *name);
        let slot = Slot::new(known.unwrap_or_else(|| {
            self.names.push(name.into());
            self.names.len() - 1
        }));
        if let Some(inside) = self
            .inside
            .as_mut()
            .filter(|inside| !inside.named.contains(&slot))
        {
            inside.named.push(slot);
        }
        slot
    }

    fn steps(&mut self, nodes: &[Stmt<'_>]) -> Vec<Step> {
        self.depth += 1;
        let steps = nodes.iter().map(|node| self.step(node)).collect();
        self.depth -= 1;
        steps
    }

    fn is_macro(&self, name: &str) -> bool {
        self.opaque.iter().any(|known| **known == *name)
            || self.macros.iter().any(|known| *known.name == *name)
    }

    /// A variable gets a value.
    fn assign(&mut self, slot: Slot) {
        let bound = match (self.open.last_mut(), &mut self.inside) {
            (Some(own), _) => own,
            (None, Some(inside)) => &mut inside.sets,
            (None, None) => &mut self.assigned,
        };
        if !bound.contains(&slot) {
            bound.push(slot);
        }
        if self.inside.is_none() && !self.assigned.contains(&slot) {
            self.assigned.push(slot);
        }
    }

    fn read(&mut self, name: &str) -> Term {
        let slot = self.slot(name);
        let in_loop = self.open.iter().any(|own| own.contains(&slot));
        if let Some(inside) = self.inside.as_mut().filter(|_| !in_loop)
            && !inside.parameters.contains(&slot)
            && !inside.sets.contains(&slot)
        {
            inside.free.push(slot);
        }
        Term::Var(slot)
    }

    fn macro_of(&mut self, node: &ast::Macro<'_>) -> Step {
        let parameters: Option<Vec<Slot>> = node
            .args
            .iter()
            .map(|arg| match arg {
                Expr::Var(name) => Some(self.slot(name.id)),
                _ => None,
            })
            .collect();
        // Of nested ones it depends on more what they see.
        let (Some(slots), 1, None) = (parameters, self.depth, &self.inside) else {
            self.opaque.push(node.name.into());
            return Step::Nothing;
        };
        let first_default = slots.len() - node.defaults.len();
        let default = |at: usize| match at.checked_sub(first_default).map(|at| &node.defaults[at]) {
            Some(Expr::Const(node)) => Some(constant(&node.value)),
            Some(_) => Some(Term::Unknown),
            None => None,
        };
        let parameters = slots
            .iter()
            .enumerate()
            .map(|(at, slot)| (*slot, default(at)))
            .collect();
        self.inside = Some(Inside {
            parameters: slots,
            ..Inside::default()
        });
        let body = Some(self.steps(&node.body));
        let Inside {
            parameters: slots,
            sets,
            free,
            mut named,
        } = self.inside.take().unwrap_or_default();
        named.retain(|slot| !slots.contains(slot));
        self.macros.push(Macro {
            name: node.name.into(),
            parameters,
            body,
            sets,
            free,
            named,
        });
        Step::Nothing
    }

    fn step(&mut self, node: &Stmt<'_>) -> Step {
        match node {
            Stmt::EmitRaw(node) => Step::Raw(node.raw.into()),
            Stmt::EmitExpr(node) => self.emit(&node.expr),
            Stmt::IfCond(node) => Step::If {
                test: self.term(&node.expr),
                then: self.steps(&node.true_body),
                otherwise: self.steps(&node.false_body),
            },
            Stmt::ForLoop(node) => self.for_loop(node),
            Stmt::Set(node) => self.set(node),
            Stmt::Break(_) => Step::Break,
            Stmt::Continue(_) => Step::Continue,
            // It does nothing until it is called.
            Stmt::Macro(node) => self.macro_of(node),
            _ => Step::Unknown,
        }
    }

    /// Sums of texts are written piece by piece instead of being put together first.
    fn emit(&mut self, expr: &Expr<'_>) -> Step {
        if let Expr::BinOp(node) = expr {
            match node.op {
                BinOpKind::Add => return Step::Texts(self.chain(expr, BinOpKind::Add)),
                BinOpKind::Concat => return Step::Joined(self.chain(expr, BinOpKind::Concat)),
                _ => {}
            }
        }
        Step::Emit(self.term(expr))
    }

    /// The operands of one operator after another, in order.
    fn chain(&mut self, expr: &Expr<'_>, op: BinOpKind) -> Vec<Term> {
        let mut operands = Vec::new();
        operands_of(expr, op, &mut operands);
        operands
            .into_iter()
            .map(|operand| self.term(operand))
            .collect()
    }

    fn for_loop(&mut self, node: &ForLoop<'_>) -> Step {
        let (Expr::Var(target), None, false) = (&node.target, &node.filter_expr, node.recursive)
        else {
            return Step::Unknown;
        };
        let over = self.term(&node.iter);
        let (target, counter) = (self.slot(target.id), self.slot("loop"));
        self.open.push(Vec::new());
        self.assign(target);
        self.assign(counter);
        let body = self.steps(&node.body);
        let own = self.open.pop().unwrap_or_default();
        let otherwise = self.steps(&node.else_body);
        Step::For(Box::new(For {
            target,
            counter,
            over,
            body,
            otherwise,
            own,
        }))
    }

    fn set(&mut self, node: &Set<'_>) -> Step {
        let value = self.term(&node.expr);
        match &node.target {
            Expr::Var(name) if !is_function(name.id) && !self.is_macro(name.id) => {
                let slot = self.slot(name.id);
                self.assign(slot);
                Step::Set(slot, value)
            }
            Expr::GetAttr(node) => match &node.expr {
                Expr::Var(space) => match self.read(space.id) {
                    Term::Var(slot) => Step::SetField(slot, node.name.into(), value),
                    _ => Step::Unknown,
                },
                _ => Step::Unknown,
            },
            _ => Step::Unknown,
        }
    }

    fn boxed(&mut self, expr: &Expr<'_>) -> Box<Term> {
        Box::new(self.term(expr))
    }

    fn pair(&mut self, left: &Expr<'_>, right: &Expr<'_>) -> Box<(Term, Term)> {
        Box::new((self.term(left), self.term(right)))
    }

    fn term(&mut self, expr: &Expr<'_>) -> Term {
        match expr {
            Expr::Var(var) if is_function(var.id) || self.is_macro(var.id) => Term::Unknown,
            Expr::Var(var) => self.read(var.id),
            Expr::Const(node) => constant(&node.value),
            Expr::GetAttr(node) => Term::Field(self.boxed(&node.expr), node.name.into()),
            Expr::GetItem(node) => match self.term(&node.subscript_expr) {
                Term::Text(key) => Term::Field(self.boxed(&node.expr), key),
                at => Term::Item(self.boxed(&node.expr), Box::new(at)),
            },
            Expr::Slice(node) => self.slice(node),
            Expr::UnaryOp(node) => match (&node.op, self.term(&node.expr)) {
                (UnaryOpKind::Not, term) => Term::Not(Box::new(term)),
                (UnaryOpKind::Neg, Term::Int(number)) => Term::Int(-number),
                (UnaryOpKind::Neg, _) => Term::Unknown,
            },
            Expr::BinOp(node) => self.binary(expr, node),
            Expr::Compare(node) => match node.ops.as_slice() {
                [op] => Term::Compare(comparison(op.op), self.pair(&node.expr, &op.expr)),
                _ => Term::Unknown,
            },
            Expr::IfExpr(node) => match &node.false_expr {
                Some(otherwise) => Term::If(Box::new((
                    self.term(&node.test_expr),
                    self.term(&node.true_expr),
                    self.term(otherwise),
                ))),
                None => Term::Unknown,
            },
            Expr::Filter(node) => self.filter(node),
            Expr::Test(node) => self.test(node),
            Expr::Call(node) => self.call(node),
            Expr::List(node) => Term::List(node.items.iter().map(|item| self.term(item)).collect()),
            Expr::Map(_) => Term::Unknown,
        }
    }

    fn slice(&mut self, node: &Slice<'_>) -> Term {
        let over = self.boxed(&node.expr);
        let step = node.step.as_ref().map(|step| self.term(step));
        match (&node.start, &node.stop, step) {
            (None, None, Some(Term::Int(-1))) => Term::Backwards(over),
            (start, stop, None | Some(Term::Int(1))) => {
                let mut end = |end: &Option<Expr<'_>>| end.as_ref().map(|end| self.boxed(end));
                Term::Slice(over, end(start), end(stop))
            }
            _ => Term::Unknown,
        }
    }

    fn binary(&mut self, expr: &Expr<'_>, node: &BinOp<'_>) -> Term {
        if matches!(node.op, BinOpKind::Concat) {
            return Term::Joined(self.chain(expr, BinOpKind::Concat));
        }
        let pair = self.pair(&node.left, &node.right);
        match node.op {
            BinOpKind::Eq => Term::Compare(Comparison::Eq, pair),
            BinOpKind::Ne => Term::Compare(Comparison::Ne, pair),
            BinOpKind::Lt => Term::Compare(Comparison::Lt, pair),
            BinOpKind::Lte => Term::Compare(Comparison::Lte, pair),
            BinOpKind::Gt => Term::Compare(Comparison::Gt, pair),
            BinOpKind::Gte => Term::Compare(Comparison::Gte, pair),
            BinOpKind::In => Term::Compare(Comparison::In, pair),
            BinOpKind::ScAnd => Term::And(pair),
            BinOpKind::ScOr => Term::Or(pair),
            BinOpKind::Add => Term::Arithmetic(Operation::Add, pair),
            BinOpKind::Sub => Term::Arithmetic(Operation::Sub, pair),
            BinOpKind::Rem => Term::Arithmetic(Operation::Rem, pair),
            BinOpKind::Concat
            | BinOpKind::Mul
            | BinOpKind::Div
            | BinOpKind::FloorDiv
            | BinOpKind::Pow => Term::Unknown,
        }
    }

    fn filter(&mut self, node: &Filter<'_>) -> Term {
        let Some(over) = &node.expr else {
            return Term::Unknown;
        };
        let known = match (node.name, node.args.as_slice()) {
            ("trim", []) => Known::Trim,
            ("length" | "count", []) => Known::Length,
            ("first", []) => Known::First,
            ("last", []) => Known::Last,
            ("string" | "safe", []) => Known::Same,
            ("default" | "d", [CallArg::Pos(otherwise)]) => Known::Default(self.boxed(otherwise)),
            ("replace", [CallArg::Pos(what), CallArg::Pos(by)]) => {
                Known::Replace(self.pair(what, by))
            }
            ("tojson", options) => match options.iter().map(option).collect() {
                Some(options) => Known::Json(options),
                None => return Term::Unknown,
            },
            _ => return Term::Unknown,
        };
        Term::Filtered(self.boxed(over), known)
    }

    fn test(&mut self, node: &Test<'_>) -> Term {
        if matches!((&node.expr, node.name), (Expr::Var(var), "defined") if var.id == "strftime_now")
        {
            return Term::Bool(true);
        }
        let over = self.boxed(&node.expr);
        let kind = match (node.name, node.args.as_slice()) {
            ("defined", []) => Kind::Defined,
            ("undefined", []) => Kind::Undefined,
            ("none", []) => Kind::None,
            ("string", []) => Kind::Text,
            ("mapping", []) => Kind::Mapping,
            ("iterable", []) => Kind::Iterable,
            ("true", []) => Kind::True,
            ("false", []) => Kind::False,
            (name, [CallArg::Pos(other)]) => {
                let comparison = match name {
                    "eq" | "equalto" | "==" => Comparison::Eq,
                    "ne" | "!=" => Comparison::Ne,
                    "in" => Comparison::In,
                    _ => return Term::Unknown,
                };
                return Term::Compare(comparison, Box::new((*over, self.term(other))));
            }
            _ => return Term::Unknown,
        };
        Term::Is(over, kind)
    }

    fn call(&mut self, node: &Call<'_>) -> Term {
        let positional = |arg: &CallArg<'_>| matches!(arg, CallArg::Pos(_));
        match &node.expr {
            Expr::GetAttr(method) if node.args.iter().all(positional) => {
                let known = match (method.name, node.args.len()) {
                    ("strip", 0..=1) => Method::Strip,
                    ("lstrip", 0..=1) => Method::LStrip,
                    ("rstrip", 0..=1) => Method::RStrip,
                    ("startswith", 1) => Method::StartsWith,
                    ("endswith", 1) => Method::EndsWith,
                    ("split", 1) => Method::Split,
                    ("replace", 2) => Method::Replace,
                    ("get", 1..=2) => Method::Get,
                    _ => return Term::Unknown,
                };
                let over = self.boxed(&method.expr);
                Term::Method(
                    over,
                    known,
                    node.args.iter().map(|arg| self.argument(arg)).collect(),
                )
            }
            Expr::Var(function) => match (function.id, node.args.as_slice()) {
                ("strftime_now", [CallArg::Pos(format)]) => Term::Now(self.boxed(format)),
                ("namespace", fields) => {
                    let field = |field: &CallArg<'_>| match field {
                        CallArg::Kwarg(name, value) => Some(((*name).into(), self.term(value))),
                        _ => None,
                    };
                    fields
                        .iter()
                        .map(field)
                        .collect::<Option<_>>()
                        .map_or(Term::Unknown, Term::Space)
                }
                (name, args) => self.call_of_macro(name, args).unwrap_or(Term::Unknown),
            },
            _ => Term::Unknown,
        }
    }

    fn call_of_macro(&mut self, name: &str, args: &[CallArg<'_>]) -> Option<Term> {
        // The last of this name.
        let called = self.macros.iter().rposition(|known| *known.name == *name)?;
        if self.opaque.iter().any(|known| **known == *name) {
            return None;
        }
        let mut given: Vec<(Slot, Term)> = Vec::new();
        for (place, arg) in args.iter().enumerate() {
            let (slot, value) = match arg {
                CallArg::Pos(value) => (self.macros[called].parameters.get(place)?.0, value),
                CallArg::Kwarg(name, value) => (self.slot(name), value),
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => return None,
            };
            let known = self.macros[called]
                .parameters
                .iter()
                .any(|(parameter, _)| *parameter == slot);
            if !known || given.iter().any(|(taken, _)| *taken == slot) {
                return None;
            }
            given.push((slot, self.term(value)));
        }
        Some(Term::Call(called, given))
    }

    fn argument(&mut self, arg: &CallArg<'_>) -> Term {
        match arg {
            CallArg::Pos(value) => self.term(value),
            _ => Term::Unknown,
        }
    }
}

/// The operands of a chain of one operator.
fn operands_of<'t, 'e>(expr: &'t Expr<'e>, op: BinOpKind, into: &mut Vec<&'t Expr<'e>>) {
    match expr {
        Expr::BinOp(node) if std::mem::discriminant(&node.op) == std::mem::discriminant(&op) => {
            operands_of(&node.left, op, into);
            operands_of(&node.right, op, into);
        }
        _ => into.push(expr),
    }
}

fn comparison(op: CompareOpKind) -> Comparison {
    match op {
        CompareOpKind::Eq => Comparison::Eq,
        CompareOpKind::Ne => Comparison::Ne,
        CompareOpKind::Lt => Comparison::Lt,
        CompareOpKind::Lte => Comparison::Lte,
        CompareOpKind::Gt => Comparison::Gt,
        CompareOpKind::Gte => Comparison::Gte,
        CompareOpKind::In => Comparison::In,
        CompareOpKind::NotIn => Comparison::NotIn,
    }
}

fn constant(value: &Value) -> Term {
    if let Some(text) = value.as_str() {
        return Term::Text(text.into());
    }
    match (
        value.is_none(),
        bool::try_from(value.clone()),
        value.as_i64().filter(|_| value.is_integer()),
    ) {
        (true, ..) => Term::None,
        (_, Ok(flag), _) if value.kind() == ValueKind::Bool => Term::Bool(flag),
        (.., Some(number)) if value.kind() == ValueKind::Number => Term::Int(number),
        _ => Term::Unknown,
    }
}

/// An option of a filter that is a constant.
fn option(arg: &CallArg<'_>) -> Option<(Box<str>, Value)> {
    match arg {
        CallArg::Kwarg(name, Expr::Const(node)) => Some(((*name).into(), node.value.clone())),
        _ => None,
    }
}
