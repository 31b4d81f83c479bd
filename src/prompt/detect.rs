//! What a template expects, told from its syntax tree as vLLM tells it from Jinja2's: does it loop over the parts of a
//! message, or does it take the content for one string? The rules follow vLLM's to the letter, oddities included.

use minijinja::machinery::ast::{Const, Expr, ForLoop, Set, Spanned, Stmt};

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
    let mut loops = Vec::new();
    let mut sets = Vec::new();
    walk(template, &mut |node| match node {
        Node::Stmt(Stmt::ForLoop(node)) => loops.push(node),
        Node::Stmt(Stmt::Set(node)) => sets.push(node),
        _ => {}
    });
    match loops_over_content(&loops, &sets) {
        Some(true) => ContentFormat::Parts,
        Some(false) | None => ContentFormat::Text,
    }
}

fn loops_over_content(loops: &[&Spanned<ForLoop<'_>>], sets: &[&Spanned<Set<'_>>]) -> Option<bool> {
    let lists = aliases_of_messages(sets)?;
    let mut messages = Vec::new();
    for node in loops {
        if lists.iter().any(|list| reads(&node.iter, list, None)) {
            messages.push(name(&node.target)?);
        }
    }
    for node in loops {
        let over_content = messages.iter().any(|message| reads(&node.iter, message, Some("content")));
        if over_content || name(&node.iter) == Some("content") {
            return name(&node.target).map(|_| true);
        }
    }
    Some(false)
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

fn name<'t>(expr: &Expr<'t>) -> Option<&'t str> {
    match expr {
        Expr::Var(var) => Some(var.id),
        _ => None,
    }
}

/// Whether an expression is the variable (or its attribute), seen through filters, tests and slices.
fn reads(expr: &Expr<'_>, variable: &str, attribute: Option<&str>) -> bool {
    match (expr, attribute) {
        (Expr::Filter(node), _) => node.expr.as_ref().is_some_and(|inner| reads(inner, variable, attribute)),
        (Expr::Test(node), _) => reads(&node.expr, variable, attribute),
        (Expr::Slice(node), _) => reads(&node.expr, variable, attribute),
        (Expr::GetAttr(node), Some(attribute)) => node.name == attribute && name(&node.expr) == Some(variable),
        (Expr::GetItem(node), Some(attribute)) => {
            name(&node.expr) == Some(variable) && is_text(&node.subscript_expr, attribute)
        }
        (Expr::Var(var), None) => var.id == variable,
        _ => false,
    }
}

fn is_text(expr: &Expr<'_>, text: &str) -> bool {
    let constant: Option<&Const> = match expr {
        Expr::Const(node) => Some(node),
        _ => None,
    };
    constant.is_some_and(|constant| constant.value.as_str() == Some(text))
}
