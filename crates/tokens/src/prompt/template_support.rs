//! Checks that a template can be rendered exactly. A template with an unsupported feature is
//! rejected at load, which is better than failing each request or producing wrong tokens.

use std::collections::BTreeSet;

use minijinja::machinery::ast::{BinOp, BinOpKind, Call, Expr, Stmt};

use super::python_methods::{FILTERS, METHODS, TESTS};
use super::syntax::{SyntaxNode, walk};

/// Names of Python `dict` methods. In Python, `x.items` is the method, not the item `items`.
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

/// Returns the first unsupported feature as an error.
pub(super) fn check_supported(template: &Stmt<'_>) -> Result<(), String> {
    let mut macros: BTreeSet<&str> = BTreeSet::new();
    walk(template, &mut |node| {
        if let SyntaxNode::Stmt(Stmt::Macro(node)) = node {
            macros.insert(node.name);
        }
    });
    let mut found: Option<String> = None;
    // An attribute that is called is a method. The walk visits the call before its attribute.
    let mut called: Vec<*const Expr<'_>> = Vec::new();
    walk(template, &mut |node| {
        let problem = match node {
            SyntaxNode::Stmt(stmt) => unsupported_statement(stmt),
            SyntaxNode::Expr(Expr::Call(node)) => {
                called.push(std::ptr::from_ref(&node.expr));
                unsupported_call(node, &macros)
            }
            SyntaxNode::Expr(expr @ Expr::GetAttr(node)) => {
                let method = called.contains(&std::ptr::from_ref(expr));
                (!method && DICT_METHODS.contains(&node.name)).then(|| {
                    format!(
                        "the attribute `.{}`, which is the method in Python",
                        node.name
                    )
                })
            }
            SyntaxNode::Expr(expr) => unsupported_expression(expr),
        };
        if found.is_none() {
            found = problem;
        }
    });
    found.map_or(Ok(()), |problem| Err(format!("{problem} is not supported")))
}

fn unsupported_statement(stmt: &Stmt<'_>) -> Option<String> {
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

fn unsupported_call(node: &Call<'_>, macros: &BTreeSet<&str>) -> Option<String> {
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

fn unsupported_expression(expr: &Expr<'_>) -> Option<String> {
    match expr {
        Expr::Filter(node) if !FILTERS.contains(&node.name) => {
            Some(format!("the filter `{}`", node.name))
        }
        Expr::Test(node) if !TESTS.contains(&node.name) => {
            Some(format!("the test `{}`", node.name))
        }
        Expr::BinOp(node) => unsupported_operator(node),
        Expr::GetItem(node) => unsupported_item(&node.subscript_expr),
        _ => None,
    }
}

/// Rejects an item with the name of a method. If the dict lacks the item, Jinja2 falls back to the
/// attribute, which is the method.
fn unsupported_item(subscript: &Expr<'_>) -> Option<String> {
    let Expr::Const(key) = subscript else {
        return None;
    };
    let key = key
        .value
        .as_str()
        .filter(|key| DICT_METHODS.contains(key))?;
    Some(format!(
        "the item `['{key}']`, which is the method in Python if the item is missing"
    ))
}

fn unsupported_operator(node: &BinOp<'_>) -> Option<String> {
    // Jinja2 marks the text as safe, and escapes any text that is added to it.
    let safe = |expr: &Expr<'_>| matches!(expr, Expr::Filter(filter) if filter.name == "safe");
    match node.op {
        BinOpKind::Add if safe(&node.left) || safe(&node.right) => {
            Some("adding to text filtered by `safe`".to_owned())
        }
        BinOpKind::Pow => Some("the operator `**`".to_owned()),
        _ => None,
    }
}
