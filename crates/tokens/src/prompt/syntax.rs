//! Traversal of a template's syntax tree, for checks at load.

use minijinja::machinery::ast::{CallArg, Expr, Stmt};

/// A statement or an expression.
#[derive(Clone, Copy)]
pub(super) enum SyntaxNode<'t> {
    Stmt(&'t Stmt<'t>),
    Expr(&'t Expr<'t>),
}

/// Visits every node before its children, in the order of the source.
pub(super) fn walk<'t>(stmt: &'t Stmt<'t>, visit: &mut dyn FnMut(SyntaxNode<'t>)) {
    visit(SyntaxNode::Stmt(stmt));
    match stmt {
        Stmt::Template(node) => walk_all(&node.children, visit),
        Stmt::EmitExpr(node) => walk_expr(&node.expr, visit),
        Stmt::ForLoop(node) => {
            walk_expr(&node.target, visit);
            walk_expr(&node.iter, visit);
            walk_all(&node.body, visit);
            walk_all(&node.else_body, visit);
            walk_exprs(node.filter_expr.as_ref(), visit);
        }
        Stmt::IfCond(node) => {
            walk_expr(&node.expr, visit);
            walk_all(&node.true_body, visit);
            walk_all(&node.false_body, visit);
        }
        Stmt::WithBlock(node) => {
            for (target, value) in &node.assignments {
                walk_exprs([target, value], visit);
            }
            walk_all(&node.body, visit);
        }
        Stmt::Set(node) => walk_exprs([&node.target, &node.expr], visit),
        Stmt::SetBlock(node) => {
            walk_expr(&node.target, visit);
            walk_exprs(node.filter.as_ref(), visit);
            walk_all(&node.body, visit);
        }
        Stmt::AutoEscape(node) => walk_all(&node.body, visit),
        Stmt::FilterBlock(node) => {
            walk_expr(&node.filter, visit);
            walk_all(&node.body, visit);
        }
        Stmt::Block(node) => walk_all(&node.body, visit),
        Stmt::Macro(node) => {
            walk_exprs(&node.args, visit);
            walk_exprs(&node.defaults, visit);
            walk_all(&node.body, visit);
        }
        Stmt::CallBlock(node) => {
            walk_expr(&node.call.expr, visit);
            walk_args(&node.call.args, visit);
            walk_all(&node.macro_decl.body, visit);
        }
        Stmt::Do(node) => {
            walk_expr(&node.call.expr, visit);
            walk_args(&node.call.args, visit);
        }
        Stmt::EmitRaw(_)
        | Stmt::Import(_)
        | Stmt::FromImport(_)
        | Stmt::Extends(_)
        | Stmt::Include(_)
        | Stmt::Continue(_)
        | Stmt::Break(_) => {}
    }
}

fn walk_all<'t>(stmts: &'t [Stmt<'t>], visit: &mut dyn FnMut(SyntaxNode<'t>)) {
    for stmt in stmts {
        walk(stmt, visit);
    }
}

fn walk_exprs<'t>(
    nodes: impl IntoIterator<Item = &'t Expr<'t>>,
    visit: &mut dyn FnMut(SyntaxNode<'t>),
) {
    for node in nodes {
        walk_expr(node, visit);
    }
}

fn walk_args<'t>(args: &'t [CallArg<'t>], visit: &mut dyn FnMut(SyntaxNode<'t>)) {
    for arg in args {
        match arg {
            CallArg::Pos(value)
            | CallArg::Kwarg(_, value)
            | CallArg::PosSplat(value)
            | CallArg::KwargSplat(value) => {
                walk_expr(value, visit);
            }
        }
    }
}

fn walk_expr<'t>(node: &'t Expr<'t>, visit: &mut dyn FnMut(SyntaxNode<'t>)) {
    visit(SyntaxNode::Expr(node));
    match node {
        Expr::Var(_) | Expr::Const(_) => {}
        Expr::Slice(node) => {
            walk_expr(&node.expr, visit);
            walk_exprs(
                [&node.start, &node.stop, &node.step].into_iter().flatten(),
                visit,
            );
        }
        Expr::UnaryOp(node) => walk_expr(&node.expr, visit),
        Expr::BinOp(node) => walk_exprs([&node.left, &node.right], visit),
        Expr::Compare(node) => {
            walk_expr(&node.expr, visit);
            walk_exprs(node.ops.iter().map(|op| &op.expr), visit);
        }
        Expr::IfExpr(node) => {
            walk_exprs([&node.test_expr, &node.true_expr], visit);
            walk_exprs(node.false_expr.as_ref(), visit);
        }
        Expr::Filter(node) => {
            walk_exprs(node.expr.as_ref(), visit);
            walk_args(&node.args, visit);
        }
        Expr::Test(node) => {
            walk_expr(&node.expr, visit);
            walk_args(&node.args, visit);
        }
        Expr::GetAttr(node) => walk_expr(&node.expr, visit),
        Expr::GetItem(node) => walk_exprs([&node.expr, &node.subscript_expr], visit),
        Expr::Call(node) => {
            walk_expr(&node.expr, visit);
            walk_args(&node.args, visit);
        }
        Expr::List(node) => walk_exprs(&node.items, visit),
        Expr::Map(node) => {
            for (key, value) in node.keys.iter().zip(&node.values) {
                walk_exprs([key, value], visit);
            }
        }
    }
}
