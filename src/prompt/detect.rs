//! What a template expects, told from its syntax tree as vLLM tells it from Jinja2's: does it loop over the parts of a
//! message, or does it take the content for one string? The rules follow vLLM's to the letter, oddities included.

use std::collections::HashMap;

use minijinja::machinery::ast::{Call, CallArg, Const, Expr, ForLoop, Macro, Set, Spanned, Stmt};

use super::syntax::{Node, walk};

/// The shape of a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// One string: vLLM's format `string`.
    Text,
    /// A list of parts: vLLM's format `openai`.
    Parts,
}

/// The content format of a template. A target that is not a plain name makes vLLM give up, and then it takes `string`.
pub(super) fn content_format(template: &Stmt<'_>) -> ContentFormat {
    let mut found = Found::default();
    walk(template, &mut |node| match node {
        Node::Stmt(Stmt::ForLoop(node)) => found.loops.push(node),
        Node::Stmt(Stmt::Set(node)) => found.sets.push(node),
        Node::Stmt(Stmt::Macro(node)) => found.macros.push(node),
        Node::Expr(Expr::Call(node)) => found.calls.push(node),
        _ => {}
    });
    match found.loops_over_content() {
        Some(true) => ContentFormat::Parts,
        Some(false) | None => ContentFormat::Text,
    }
}

/// What of a template matters for its format.
#[derive(Default)]
struct Found<'t> {
    loops: Vec<&'t Spanned<ForLoop<'t>>>,
    sets: Vec<&'t Spanned<Set<'t>>>,
    macros: Vec<&'t Spanned<Macro<'t>>>,
    calls: Vec<&'t Spanned<Call<'t>>>,
}

impl<'t> Found<'t> {
    fn loops_over_content(&self) -> Option<bool> {
        let lists = aliases_of_messages(&self.sets)?;
        let mut messages = Vec::new();
        for node in &self.loops {
            if lists.iter().any(|list| reads(&node.iter, list, None)) {
                messages.push(name(&node.target)?);
            }
        }
        let mut in_macros: HashMap<*const Spanned<ForLoop<'t>>, Vec<&str>> = HashMap::new();
        for node in &self.macros {
            let bound = self.bound_to_content(node, &messages);
            for inner in loops_in(&node.body) {
                let names = in_macros.entry(std::ptr::from_ref(inner)).or_default();
                // Of macros in macros that both take the content, the inner one counts.
                if !bound.is_empty() {
                    names.clone_from(&bound);
                }
            }
        }
        for &node in &self.loops {
            let over_content = messages
                .iter()
                .any(|message| reads(&node.iter, message, Some("content")));
            let over_name = match (name(&node.iter), in_macros.get(&std::ptr::from_ref(node))) {
                (Some(iter), Some(bound)) => bound.contains(&iter),
                (Some(iter), None) => iter == "content",
                (None, _) => false,
            };
            if over_content || over_name {
                return name(&node.target).map(|_| true);
            }
        }
        Some(false)
    }

    /// The parameters of a macro to which some call hands the content of a message.
    fn bound_to_content(&self, node: &Macro<'t>, messages: &[&str]) -> Vec<&'t str> {
        let is_content = |value: &Expr<'_>| {
            messages
                .iter()
                .any(|message| reads(value, message, Some("content")))
        };
        let parameters: Vec<&'t str> = node.args.iter().filter_map(name).collect();
        let mut bound = Vec::new();
        for call in self
            .calls
            .iter()
            .filter(|call| name(&call.expr) == Some(node.name))
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

/// The loops in the body of a macro.
fn loops_in<'t>(body: &'t [Stmt<'t>]) -> Vec<&'t Spanned<ForLoop<'t>>> {
    let mut loops = Vec::new();
    for stmt in body {
        walk(stmt, &mut |node| {
            if let Node::Stmt(Stmt::ForLoop(node)) = node {
                loops.push(node);
            }
        });
    }
    loops
}

/// The variables that hold the messages or some of them.
fn aliases_of_messages<'t>(sets: &[&'t Spanned<Set<'t>>]) -> Option<Vec<&'t str>> {
    let mut aliases = vec!["messages"];
    let mut place = 0;
    while let Some(alias) = aliases.get(place).copied() {
        for set in sets.iter().filter(|set| reads(&set.expr, alias, None)) {
            let target = name(&set.target)?;
            if !aliases.contains(&target) {
                aliases.push(target);
            }
        }
        place += 1;
    }
    Some(aliases)
}

/// The name of a plain variable.
pub(super) fn name<'t>(expr: &Expr<'t>) -> Option<&'t str> {
    match expr {
        Expr::Var(var) => Some(var.id),
        _ => None,
    }
}

/// Whether an expression is the variable (or its attribute), seen through filters, tests and slices.
fn reads(expr: &Expr<'_>, variable: &str, attribute: Option<&str>) -> bool {
    match (expr, attribute) {
        (Expr::Filter(node), _) => node
            .expr
            .as_ref()
            .is_some_and(|inner| reads(inner, variable, attribute)),
        (Expr::Test(node), _) => reads(&node.expr, variable, attribute),
        (Expr::Slice(node), _) => reads(&node.expr, variable, attribute),
        (Expr::GetAttr(node), Some(attribute)) => {
            node.name == attribute && name(&node.expr) == Some(variable)
        }
        (Expr::GetItem(node), Some(attribute)) => {
            name(&node.expr) == Some(variable) && is_text(&node.subscript_expr, attribute)
        }
        (Expr::Var(var), None) => var.id == variable,
        _ => false,
    }
}

/// Whether an expression is this text.
pub(super) fn is_text(expr: &Expr<'_>, text: &str) -> bool {
    let constant: Option<&Const> = match expr {
        Expr::Const(node) => Some(node),
        _ => None,
    };
    constant.is_some_and(|constant| constant.value.as_str() == Some(text))
}
