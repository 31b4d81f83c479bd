//! Compilation of filters, tests, methods and calls.

use minijinja::Value;
use minijinja::machinery::ast::{Call, CallArg, CompareOpKind, Expr, Filter, Test};

use super::PlanCompiler;
use crate::prompt::direct::plan::{KnownFilter, PlanTerm, StringMethod, ValueTest, VariableSlot};

impl PlanCompiler {
    pub(super) fn filter(&mut self, node: &Filter<'_>) -> PlanTerm {
        let Some(over) = &node.expr else {
            return PlanTerm::Unknown;
        };
        let known = match (node.name, node.args.as_slice()) {
            ("trim", []) => KnownFilter::Trim,
            ("length" | "count", []) => KnownFilter::Length,
            ("first", []) => KnownFilter::First,
            ("last", []) => KnownFilter::Last,
            ("string" | "safe", []) => KnownFilter::Identity,
            ("default" | "d", [CallArg::Pos(otherwise)]) => {
                KnownFilter::Default(self.boxed(otherwise))
            }
            ("replace", [CallArg::Pos(what), CallArg::Pos(by)]) => {
                KnownFilter::Replace(self.pair(what, by))
            }
            ("tojson", options) => match options.iter().map(option).collect() {
                Some(options) => KnownFilter::Json(options),
                None => return PlanTerm::Unknown,
            },
            _ => return PlanTerm::Unknown,
        };
        PlanTerm::Filtered(self.boxed(over), known)
    }

    pub(super) fn test(&mut self, node: &Test<'_>) -> PlanTerm {
        if matches!((&node.expr, node.name), (Expr::Var(var), "defined") if var.id == "strftime_now")
        {
            return PlanTerm::Bool(true);
        }
        let over = self.boxed(&node.expr);
        let kind = match (node.name, node.args.as_slice()) {
            ("defined", []) => ValueTest::Defined,
            ("undefined", []) => ValueTest::Undefined,
            ("none", []) => ValueTest::None,
            ("string", []) => ValueTest::Text,
            ("mapping", []) => ValueTest::Mapping,
            ("iterable", []) => ValueTest::Iterable,
            ("true", []) => ValueTest::True,
            ("false", []) => ValueTest::False,
            (name, [CallArg::Pos(other)]) => {
                let comparison = match name {
                    "eq" | "equalto" | "==" => CompareOpKind::Eq,
                    "ne" | "!=" => CompareOpKind::Ne,
                    "in" => CompareOpKind::In,
                    _ => return PlanTerm::Unknown,
                };
                return PlanTerm::Compare(comparison, Box::new((*over, self.term(other))));
            }
            _ => return PlanTerm::Unknown,
        };
        PlanTerm::Is(over, kind)
    }

    pub(super) fn call(&mut self, node: &Call<'_>) -> PlanTerm {
        let positional = |arg: &CallArg<'_>| matches!(arg, CallArg::Pos(_));
        match &node.expr {
            Expr::GetAttr(method) if node.args.iter().all(positional) => {
                let known = match (method.name, node.args.len()) {
                    ("strip", 0..=1) => StringMethod::Strip,
                    ("lstrip", 0..=1) => StringMethod::LStrip,
                    ("rstrip", 0..=1) => StringMethod::RStrip,
                    ("startswith", 1) => StringMethod::StartsWith,
                    ("endswith", 1) => StringMethod::EndsWith,
                    ("split", 1) => StringMethod::Split,
                    ("replace", 2) => StringMethod::Replace,
                    ("get", 1..=2) => StringMethod::Get,
                    _ => return PlanTerm::Unknown,
                };
                let over = self.boxed(&method.expr);
                PlanTerm::Method(
                    over,
                    known,
                    node.args.iter().map(|arg| self.argument(arg)).collect(),
                )
            }
            Expr::Var(function) => match (function.id, node.args.as_slice()) {
                ("strftime_now", [CallArg::Pos(format)]) => PlanTerm::Now(self.boxed(format)),
                ("namespace", fields) => {
                    let field = |field: &CallArg<'_>| match field {
                        CallArg::Kwarg(name, value) => Some(((*name).into(), self.term(value))),
                        _ => None,
                    };
                    fields
                        .iter()
                        .map(field)
                        .collect::<Option<_>>()
                        .map_or(PlanTerm::Unknown, PlanTerm::Namespace)
                }
                (name, args) => self.call_of_macro(name, args).unwrap_or(PlanTerm::Unknown),
            },
            _ => PlanTerm::Unknown,
        }
    }

    fn call_of_macro(&mut self, name: &str, args: &[CallArg<'_>]) -> Option<PlanTerm> {
        // A later macro replaces an earlier one of the same name.
        let called = self.macros.iter().rposition(|known| *known.name == *name)?;
        if self.opaque.iter().any(|known| **known == *name) {
            return None;
        }
        let mut given: Vec<(VariableSlot, PlanTerm)> = Vec::new();
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
        Some(PlanTerm::Call(called, given))
    }

    fn argument(&mut self, arg: &CallArg<'_>) -> PlanTerm {
        match arg {
            CallArg::Pos(value) => self.term(value),
            _ => PlanTerm::Unknown,
        }
    }
}

/// Returns an option of a filter if it is a constant.
fn option(arg: &CallArg<'_>) -> Option<(Box<str>, Value)> {
    match arg {
        CallArg::Kwarg(name, Expr::Const(node)) => Some(((*name).into(), node.value.clone())),
        _ => None,
    }
}
