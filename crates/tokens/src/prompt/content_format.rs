//! Detection of the content format that a template expects: a list of parts that it iterates over,
//! or one string. The rules copy those of vLLM exactly, including their oddities, but on
//! minijinja's syntax tree.

use std::collections::HashMap;

use minijinja::machinery::ast::{Call, CallArg, Const, Expr, ForLoop, Macro, Set, Spanned, Stmt};

use super::syntax::{SyntaxNode, walk};

/// Format of a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// One string: vLLM's format `string`.
    Text,
    /// A list of parts: vLLM's format `openai`.
    Parts,
}

/// Detects the content format of a template. If an assignment target is not a plain name, vLLM
/// stops the detection and uses `string`.
pub(super) fn content_format(template: &Stmt<'_>) -> ContentFormat {
    let mut found = TemplateNodes::default();
    walk(template, &mut |node| match node {
        SyntaxNode::Stmt(Stmt::ForLoop(node)) => found.loops.push(node),
        SyntaxNode::Stmt(Stmt::Set(node)) => found.sets.push(node),
        SyntaxNode::Stmt(Stmt::Macro(node)) => found.macros.push(node),
        SyntaxNode::Expr(Expr::Call(node)) => found.calls.push(node),
        _ => {}
    });
    match found.loops_over_content() {
        Some(true) => ContentFormat::Parts,
        Some(false) | None => ContentFormat::Text,
    }
}

/// Syntax nodes that decide the content format.
#[derive(Default)]
struct TemplateNodes<'t> {
    loops: Vec<&'t Spanned<ForLoop<'t>>>,
    sets: Vec<&'t Spanned<Set<'t>>>,
    macros: Vec<&'t Spanned<Macro<'t>>>,
    calls: Vec<&'t Spanned<Call<'t>>>,
}

impl<'t> TemplateNodes<'t> {
    fn loops_over_content(&self) -> Option<bool> {
        let lists = aliases_of_messages(&self.sets)?;
        let mut messages = Vec::new();
        for node in &self.loops {
            if lists.iter().any(|list| refers_to(&node.iter, list, None)) {
                messages.push(variable_name(&node.target)?);
            }
        }
        let mut in_macros: HashMap<*const Spanned<ForLoop<'t>>, Vec<&str>> = HashMap::new();
        for node in &self.macros {
            let bound = self.bound_to_content(node, &messages);
            for inner in loops_in(&node.body) {
                let names = in_macros.entry(std::ptr::from_ref(inner)).or_default();
                // If nested macros both receive the content, the inner one decides.
                if !bound.is_empty() {
                    names.clone_from(&bound);
                }
            }
        }
        for &node in &self.loops {
            let over_content = messages
                .iter()
                .any(|message| refers_to(&node.iter, message, Some("content")));
            let over_name = match (
                variable_name(&node.iter),
                in_macros.get(&std::ptr::from_ref(node)),
            ) {
                (Some(iter), Some(bound)) => bound.contains(&iter),
                (Some(iter), None) => iter == "content",
                (None, _) => false,
            };
            if over_content || over_name {
                return variable_name(&node.target).map(|_| true);
            }
        }
        Some(false)
    }

    /// Returns the macro parameters that some call binds to the content of a message.
    fn bound_to_content(&self, node: &Macro<'t>, messages: &[&str]) -> Vec<&'t str> {
        let is_content = |value: &Expr<'_>| {
            messages
                .iter()
                .any(|message| refers_to(value, message, Some("content")))
        };
        let parameters: Vec<&'t str> = node.args.iter().filter_map(variable_name).collect();
        let mut bound = Vec::new();
        for call in self
            .calls
            .iter()
            .filter(|call| variable_name(&call.expr) == Some(node.name))
        {
            let mut place = 0;
            for arg in &call.args {
                match arg {
                    CallArg::Pos(value) => {
                        bound.extend(parameters.get(place).filter(|_| is_content(value)));
                        place += 1;
                    }
                    CallArg::Kwarg(key, value) if is_content(value) => {
                        bound.extend(parameters.iter().find(|parameter| *parameter == key));
                    }
                    _ => {}
                }
            }
        }
        bound
    }
}

/// Returns the loops in the body of a macro.
fn loops_in<'t>(body: &'t [Stmt<'t>]) -> Vec<&'t Spanned<ForLoop<'t>>> {
    let mut loops = Vec::new();
    for stmt in body {
        walk(stmt, &mut |node| {
            if let SyntaxNode::Stmt(Stmt::ForLoop(node)) = node {
                loops.push(node);
            }
        });
    }
    loops
}

/// Returns the variables that hold all or some of the messages.
fn aliases_of_messages<'t>(sets: &[&'t Spanned<Set<'t>>]) -> Option<Vec<&'t str>> {
    let mut aliases = vec!["messages"];
    let mut place = 0;
    while let Some(alias) = aliases.get(place).copied() {
        for set in sets.iter().filter(|set| refers_to(&set.expr, alias, None)) {
            let target = variable_name(&set.target)?;
            if !aliases.contains(&target) {
                aliases.push(target);
            }
        }
        place += 1;
    }
    Some(aliases)
}

/// Returns the name of a plain variable.
pub(super) fn variable_name<'t>(expr: &Expr<'t>) -> Option<&'t str> {
    match expr {
        Expr::Var(var) => Some(var.id),
        _ => None,
    }
}

/// Returns true if an expression is the variable (or its attribute), possibly inside filters, tests
/// and slices.
fn refers_to(expr: &Expr<'_>, variable: &str, attribute: Option<&str>) -> bool {
    match (expr, attribute) {
        (Expr::Filter(node), _) => node
            .expr
            .as_ref()
            .is_some_and(|inner| refers_to(inner, variable, attribute)),
        (Expr::Test(node), _) => refers_to(&node.expr, variable, attribute),
        (Expr::Slice(node), _) => refers_to(&node.expr, variable, attribute),
        (Expr::GetAttr(node), Some(attribute)) => {
            node.name == attribute && variable_name(&node.expr) == Some(variable)
        }
        (Expr::GetItem(node), Some(attribute)) => {
            variable_name(&node.expr) == Some(variable)
                && is_string_constant(&node.subscript_expr, attribute)
        }
        (Expr::Var(var), None) => var.id == variable,
        _ => false,
    }
}

/// Returns true if an expression is this string constant.
pub(super) fn is_string_constant(expr: &Expr<'_>, text: &str) -> bool {
    let constant: Option<&Const> = match expr {
        Expr::Const(node) => Some(node),
        _ => None,
    };
    constant.is_some_and(|constant| constant.value.as_str() == Some(text))
}
