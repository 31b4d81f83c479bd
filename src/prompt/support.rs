//! Whether a template can be followed exactly. Refusing it by name at load is kinder than failing each request, and far
//! kinder than tokens that differ from the engine's.

use std::collections::BTreeSet;

use minijinja::machinery::ast::{BinOp, BinOpKind, Call, Expr, Stmt};

use super::methods::{FILTERS, METHODS, TESTS};
use super::syntax::{Node, walk};

/// Names that are methods of a Python dict: `x.items` is then not the item `items`.
const DICT_METHODS: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];

/// Functions that templates may call.
const FUNCTIONS: [&str; 6] = [
    "caller",
    "dict",
    "namespace",
    "raise_exception",
    "range",
    "strftime_now",
];

/// Names the first unsupported feature.
pub(super) fn check(template: &Stmt<'_>) -> Result<(), String> {
    let mut macros: BTreeSet<&str> = BTreeSet::new();
    walk(template, &mut |node| {
        if let Node::Stmt(Stmt::Macro(node)) = node {
            macros.insert(node.name);
        }
    });
    let mut found: Option<String> = None;
    // Attributes that are called are methods; the walk sees the call first.
    let mut called: Vec<*const Expr<'_>> = Vec::new();
    walk(template, &mut |node| {
        let problem = match node {
            Node::Stmt(stmt) => statement(stmt),
            Node::Expr(Expr::Call(node)) => {
                called.push(std::ptr::from_ref(&node.expr));
                call(node, &macros)
            }
            Node::Expr(expr @ Expr::GetAttr(node)) => {
                let method = called.contains(&std::ptr::from_ref(expr));
                (!method && DICT_METHODS.contains(&node.name)).then(|| {
                    format!(
                        "the attribute `.{}`, which Python takes for the method",
                        node.name
                    )
                })
            }
            Node::Expr(expr) => expression(expr),
        };
        if found.is_none() {
            found = problem;
        }
    });
    found.map_or(Ok(()), |problem| Err(format!("{problem} is not supported")))
}

fn statement(stmt: &Stmt<'_>) -> Option<String> {
    let name = match stmt {
        Stmt::Import(_) | Stmt::FromImport(_) => "import",
        Stmt::Extends(_) => "extends",
        Stmt::Include(_) => "include",
        Stmt::Block(_) => "block",
        Stmt::AutoEscape(_) => "autoescape",
        Stmt::Do(_) => "do",
        Stmt::ForLoop(node) if node.recursive => "for … recursive",
        _ => return None,
    };
    Some(format!("the statement `{name}`"))
}

fn call(node: &Call<'_>, macros: &BTreeSet<&str>) -> Option<String> {
    match &node.expr {
        Expr::Var(function) if FUNCTIONS.contains(&function.id) || macros.contains(function.id) => {
            None
        }
        Expr::Var(function) => Some(format!("the function `{}`", function.id)),
        Expr::GetAttr(method) if METHODS.contains(&method.name) => None,
        Expr::GetAttr(method) if method.name == "cycle" => None,
        Expr::GetAttr(method) => Some(format!("the method `{}`", method.name)),
        _ => Some("a call of an expression".to_owned()),
    }
}

fn expression(expr: &Expr<'_>) -> Option<String> {
    match expr {
        Expr::Filter(node) if !FILTERS.contains(&node.name) => {
            Some(format!("the filter `{}`", node.name))
        }
        Expr::Test(node) if !TESTS.contains(&node.name) => {
            Some(format!("the test `{}`", node.name))
        }
        Expr::BinOp(node) => binary(node),
        Expr::GetItem(node) => method_item(&node.subscript_expr),
        _ => None,
    }
}

/// Where a dict lacks the item, Jinja2 falls back to the attribute, and so to the method.
fn method_item(subscript: &Expr<'_>) -> Option<String> {
    let Expr::Const(key) = subscript else {
        return None;
    };
    let key = key
        .value
        .as_str()
        .filter(|key| DICT_METHODS.contains(key))?;
    Some(format!(
        "the item `['{key}']`, which Python takes for the method where it is missing"
    ))
}

fn binary(node: &BinOp<'_>) -> Option<String> {
    // Jinja2 marks the text as safe and then escapes whatever is added to it.
    let safe = |expr: &Expr<'_>| matches!(expr, Expr::Filter(filter) if filter.name == "safe");
    match node.op {
        BinOpKind::Add if safe(&node.left) || safe(&node.right) => {
            Some("adding to text filtered by `safe`".to_owned())
        }
        BinOpKind::Pow => Some("the operator `**`".to_owned()),
        _ => None,
    }
}
