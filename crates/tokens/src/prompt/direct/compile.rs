//! Compilation of a syntax tree to a plan. Names become slots, and concatenated texts become
//! pieces of output. Unsupported code becomes [`PlanTerm::Unknown`], which ends the evaluation if
//! it is reached.

mod calls;

use minijinja::Value;
use minijinja::machinery::ast::{
    self, BinOp, BinOpKind, CompareOpKind, Expr, ForLoop, Set, Slice, Stmt, UnaryOpKind,
};
use minijinja::value::ValueKind;

use super::plan::{LoopStep, PlanMacro, PlanStep, PlanTerm, RenderPlan, VariableSlot};

/// Names of functions. A template variable with one of these names is not supported.
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

/// Compiles a template.
pub(super) fn template(tree: &Stmt<'_>) -> RenderPlan {
    let mut compiler = PlanCompiler::default();
    let steps = match tree {
        Stmt::Template(node) => compiler.steps(&node.children),
        _ => vec![PlanStep::Unknown],
    };
    let PlanCompiler {
        names,
        mut macros,
        assigned,
        ..
    } = compiler;
    for known in &mut macros {
        // A macro that uses a variable of the template is not supported, because the value of the
        // variable at the time of a call is not tracked.
        if known
            .free
            .iter()
            .chain(&known.sets)
            .any(|slot| assigned.contains(slot))
        {
            known.body = None;
        }
    }
    RenderPlan {
        steps,
        names,
        macros,
    }
}

#[derive(Default)]
struct PlanCompiler {
    names: Vec<Box<str>>,
    macros: Vec<PlanMacro>,
    /// Names of unsupported macros.
    opaque: Vec<Box<str>>,
    /// Variables assigned in each open loop.
    open: Vec<Vec<VariableSlot>>,
    /// Number of enclosing statements.
    depth: usize,
    /// Variables assigned outside macros.
    assigned: Vec<VariableSlot>,
    /// The current macro.
    inside: Option<MacroScope>,
}

/// Variables of the current macro.
#[derive(Default)]
struct MacroScope {
    parameters: Vec<VariableSlot>,
    sets: Vec<VariableSlot>,
    /// Variables that may be read before they are assigned in the macro.
    free: Vec<VariableSlot>,
    /// All variables whose names occur in the macro.
    named: Vec<VariableSlot>,
}

impl PlanCompiler {
    fn slot(&mut self, name: &str) -> VariableSlot {
        let known = self.names.iter().position(|known| **known == *name);
        let slot = VariableSlot::new(known.unwrap_or_else(|| {
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

    fn steps(&mut self, nodes: &[Stmt<'_>]) -> Vec<PlanStep> {
        self.depth += 1;
        let steps = nodes.iter().map(|node| self.step(node)).collect();
        self.depth -= 1;
        steps
    }

    fn is_macro(&self, name: &str) -> bool {
        self.opaque.iter().any(|known| **known == *name)
            || self.macros.iter().any(|known| *known.name == *name)
    }

    /// Records the assignment of a variable.
    fn assign(&mut self, slot: VariableSlot) {
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

    fn read(&mut self, name: &str) -> PlanTerm {
        let slot = self.slot(name);
        let in_loop = self.open.iter().any(|own| own.contains(&slot));
        if let Some(inside) = self.inside.as_mut().filter(|_| !in_loop)
            && !inside.parameters.contains(&slot)
            && !inside.sets.contains(&slot)
        {
            inside.free.push(slot);
        }
        PlanTerm::Var(slot)
    }

    fn macro_of(&mut self, node: &ast::Macro<'_>) -> PlanStep {
        let parameters: Option<Vec<VariableSlot>> = node
            .args
            .iter()
            .map(|arg| match arg {
                Expr::Var(name) => Some(self.slot(name.id)),
                _ => None,
            })
            .collect();
        // Nested macros are not supported, because the variables visible to them are not tracked.
        let (Some(slots), 1, None) = (parameters, self.depth, &self.inside) else {
            self.opaque.push(node.name.into());
            return PlanStep::Nothing;
        };
        let first_default = slots.len() - node.defaults.len();
        let default = |at: usize| match at.checked_sub(first_default).map(|at| &node.defaults[at]) {
            Some(Expr::Const(node)) => Some(constant(&node.value)),
            Some(_) => Some(PlanTerm::Unknown),
            None => None,
        };
        let parameters = slots
            .iter()
            .enumerate()
            .map(|(at, slot)| (*slot, default(at)))
            .collect();
        self.inside = Some(MacroScope {
            parameters: slots,
            ..MacroScope::default()
        });
        let body = Some(self.steps(&node.body));
        let MacroScope {
            parameters: slots,
            sets,
            free,
            mut named,
        } = self.inside.take().unwrap_or_default();
        named.retain(|slot| !slots.contains(slot));
        self.macros.push(PlanMacro {
            name: node.name.into(),
            parameters,
            body,
            sets,
            free,
            named,
        });
        PlanStep::Nothing
    }

    fn step(&mut self, node: &Stmt<'_>) -> PlanStep {
        match node {
            Stmt::EmitRaw(node) => PlanStep::Raw(node.raw.into()),
            Stmt::EmitExpr(node) => self.emit(&node.expr),
            Stmt::IfCond(node) => PlanStep::If {
                test: self.term(&node.expr),
                then: self.steps(&node.true_body),
                otherwise: self.steps(&node.false_body),
            },
            Stmt::ForLoop(node) => self.for_loop(node),
            Stmt::Set(node) => self.set(node),
            Stmt::Break(_) => PlanStep::Break,
            Stmt::Continue(_) => PlanStep::Continue,
            // The definition of a macro writes nothing.
            Stmt::Macro(node) => self.macro_of(node),
            _ => PlanStep::Unknown,
        }
    }

    /// Compiles an output. Concatenated texts are written piece by piece.
    fn emit(&mut self, expr: &Expr<'_>) -> PlanStep {
        if let Expr::BinOp(node) = expr {
            match node.op {
                BinOpKind::Add => return PlanStep::Texts(self.chain(expr, BinOpKind::Add)),
                BinOpKind::Concat => return PlanStep::Joined(self.chain(expr, BinOpKind::Concat)),
                _ => {}
            }
        }
        PlanStep::Emit(self.term(expr))
    }

    /// Compiles the operands of a chain of one operator.
    fn chain(&mut self, expr: &Expr<'_>, op: BinOpKind) -> Vec<PlanTerm> {
        let mut operands = Vec::new();
        operands_of(expr, op, &mut operands);
        operands
            .into_iter()
            .map(|operand| self.term(operand))
            .collect()
    }

    fn for_loop(&mut self, node: &ForLoop<'_>) -> PlanStep {
        let (Expr::Var(target), None, false) = (&node.target, &node.filter_expr, node.recursive)
        else {
            return PlanStep::Unknown;
        };
        let over = self.term(&node.iter);
        let target = self.slot(target.id);
        let counter = self.slot("loop");
        self.open.push(Vec::new());
        self.assign(target);
        self.assign(counter);
        let body = self.steps(&node.body);
        let own = self.open.pop().unwrap_or_default();
        let otherwise = self.steps(&node.else_body);
        PlanStep::For(Box::new(LoopStep {
            target,
            counter,
            over,
            body,
            otherwise,
            own,
        }))
    }

    fn set(&mut self, node: &Set<'_>) -> PlanStep {
        let value = self.term(&node.expr);
        match &node.target {
            Expr::Var(name) if !is_function(name.id) && !self.is_macro(name.id) => {
                let slot = self.slot(name.id);
                self.assign(slot);
                PlanStep::Set(slot, value)
            }
            Expr::GetAttr(node) => match &node.expr {
                Expr::Var(space) => match self.read(space.id) {
                    PlanTerm::Var(slot) => PlanStep::SetField(slot, node.name.into(), value),
                    _ => PlanStep::Unknown,
                },
                _ => PlanStep::Unknown,
            },
            _ => PlanStep::Unknown,
        }
    }

    fn boxed(&mut self, expr: &Expr<'_>) -> Box<PlanTerm> {
        Box::new(self.term(expr))
    }

    fn pair(&mut self, left: &Expr<'_>, right: &Expr<'_>) -> Box<(PlanTerm, PlanTerm)> {
        Box::new((self.term(left), self.term(right)))
    }

    fn term(&mut self, expr: &Expr<'_>) -> PlanTerm {
        match expr {
            Expr::Var(var) if is_function(var.id) || self.is_macro(var.id) => PlanTerm::Unknown,
            Expr::Var(var) => self.read(var.id),
            Expr::Const(node) => constant(&node.value),
            Expr::GetAttr(node) => PlanTerm::Field(self.boxed(&node.expr), node.name.into()),
            Expr::GetItem(node) => match self.term(&node.subscript_expr) {
                PlanTerm::Text(key) => PlanTerm::Field(self.boxed(&node.expr), key),
                at => PlanTerm::Item(self.boxed(&node.expr), Box::new(at)),
            },
            Expr::Slice(node) => self.slice(node),
            Expr::UnaryOp(node) => match (&node.op, self.term(&node.expr)) {
                (UnaryOpKind::Not, term) => PlanTerm::Not(Box::new(term)),
                (UnaryOpKind::Neg, PlanTerm::Int(number)) => PlanTerm::Int(-number),
                (UnaryOpKind::Neg, _) => PlanTerm::Unknown,
            },
            Expr::BinOp(node) => self.binary(expr, node),
            Expr::Compare(node) => match node.ops.as_slice() {
                [op] => PlanTerm::Compare(op.op, self.pair(&node.expr, &op.expr)),
                _ => PlanTerm::Unknown,
            },
            Expr::IfExpr(node) => match &node.false_expr {
                Some(otherwise) => PlanTerm::If(Box::new((
                    self.term(&node.test_expr),
                    self.term(&node.true_expr),
                    self.term(otherwise),
                ))),
                None => PlanTerm::Unknown,
            },
            Expr::Filter(node) => self.filter(node),
            Expr::Test(node) => self.test(node),
            Expr::Call(node) => self.call(node),
            Expr::List(node) => {
                PlanTerm::List(node.items.iter().map(|item| self.term(item)).collect())
            }
            Expr::Map(_) => PlanTerm::Unknown,
        }
    }

    fn slice(&mut self, node: &Slice<'_>) -> PlanTerm {
        let over = self.boxed(&node.expr);
        let step = node.step.as_ref().map(|step| self.term(step));
        match (&node.start, &node.stop, step) {
            (None, None, Some(PlanTerm::Int(-1))) => PlanTerm::Backwards(over),
            (start, stop, None | Some(PlanTerm::Int(1))) => {
                let mut end = |end: &Option<Expr<'_>>| end.as_ref().map(|end| self.boxed(end));
                PlanTerm::Slice(over, end(start), end(stop))
            }
            _ => PlanTerm::Unknown,
        }
    }

    fn binary(&mut self, expr: &Expr<'_>, node: &BinOp<'_>) -> PlanTerm {
        if matches!(node.op, BinOpKind::Concat) {
            return PlanTerm::Joined(self.chain(expr, BinOpKind::Concat));
        }
        let pair = self.pair(&node.left, &node.right);
        match node.op {
            BinOpKind::Eq => PlanTerm::Compare(CompareOpKind::Eq, pair),
            BinOpKind::Ne => PlanTerm::Compare(CompareOpKind::Ne, pair),
            BinOpKind::Lt => PlanTerm::Compare(CompareOpKind::Lt, pair),
            BinOpKind::Lte => PlanTerm::Compare(CompareOpKind::Lte, pair),
            BinOpKind::Gt => PlanTerm::Compare(CompareOpKind::Gt, pair),
            BinOpKind::Gte => PlanTerm::Compare(CompareOpKind::Gte, pair),
            BinOpKind::In => PlanTerm::Compare(CompareOpKind::In, pair),
            BinOpKind::ScAnd => PlanTerm::And(pair),
            BinOpKind::ScOr => PlanTerm::Or(pair),
            BinOpKind::Add | BinOpKind::Sub | BinOpKind::Rem => PlanTerm::Arithmetic(node.op, pair),
            BinOpKind::Concat
            | BinOpKind::Mul
            | BinOpKind::Div
            | BinOpKind::FloorDiv
            | BinOpKind::Pow => PlanTerm::Unknown,
        }
    }
}

/// Collects the operands of a chain of one operator.
fn operands_of<'t, 'e>(expr: &'t Expr<'e>, op: BinOpKind, into: &mut Vec<&'t Expr<'e>>) {
    match expr {
        Expr::BinOp(node) if std::mem::discriminant(&node.op) == std::mem::discriminant(&op) => {
            operands_of(&node.left, op, into);
            operands_of(&node.right, op, into);
        }
        _ => into.push(expr),
    }
}

fn constant(value: &Value) -> PlanTerm {
    if let Some(text) = value.as_str() {
        return PlanTerm::Text(text.into());
    }
    match (
        value.is_none(),
        bool::try_from(value.clone()),
        value.as_i64().filter(|_| value.is_integer()),
    ) {
        (true, ..) => PlanTerm::None,
        (_, Ok(flag), _) if value.kind() == ValueKind::Bool => PlanTerm::Bool(flag),
        (.., Some(number)) if value.kind() == ValueKind::Number => PlanTerm::Int(number),
        _ => PlanTerm::Unknown,
    }
}
