//! Walks a template's syntax tree, so that what it uses can be judged once, at load.

use minijinja::machinery::ast::{CallArg, Expr, Stmt};

/// A statement or an expression.
#[derive(Clone, Copy)]
pub(super) enum Node<'t> {
    Stmt(&'t Stmt<'t>),
    Expr(&'t Expr<'t>),
}

/// Visits every node before its children, in the order of the source.
pub(super) fn walk<'t>(stmt: &'t Stmt<'t>, visit: &mut dyn FnMut(Node<'t>)) {
    visit(Node::Stmt(stmt));
    match stmt {
        Stmt::Template(node) => all(&node.children, visit),
        Stmt::EmitExpr(node) => expr(&node.expr, visit),
        Stmt::ForLoop(node) => {
            expr(&node.target, visit);
            expr(&node.iter, visit);
            all(&node.body, visit);
            all(&node.else_body, visit);
            exprs(node.filter_expr.as_ref(), visit);
        }
        Stmt::IfCond(node) => {
            expr(&node.expr, visit);
            all(&node.true_body, visit);
            all(&node.false_body, visit);
        }
        Stmt::WithBlock(node) => {
            for (target, value) in &node.assignments {
                exprs([target, value], visit);
            }
            all(&node.body, visit);
        }
        Stmt::Set(node) => exprs([&node.target, &node.expr], visit),
        Stmt::SetBlock(node) => {
            expr(&node.target, visit);
            exprs(node.filter.as_ref(), visit);
            all(&node.body, visit);
        }
        Stmt::AutoEscape(node) => all(&node.body, visit),
        Stmt::FilterBlock(node) => {
            expr(&node.filter, visit);
            all(&node.body, visit);
        }
        Stmt::Block(node) => all(&node.body, visit),
        Stmt::Macro(node) => {
            exprs(&node.args, visit);
            exprs(&node.defaults, visit);
            all(&node.body, visit);
        }
        Stmt::CallBlock(node) => {
            expr(&node.call.expr, visit);
            args(&node.call.args, visit);
            all(&node.macro_decl.body, visit);
        }
        Stmt::Do(node) => {
            expr(&node.call.expr, visit);
            args(&node.call.args, visit);
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

fn all<'t>(stmts: &'t [Stmt<'t>], visit: &mut dyn FnMut(Node<'t>)) {
    for stmt in stmts {
        walk(stmt, visit);
    }
}

fn exprs<'t>(nodes: impl IntoIterator<Item = &'t Expr<'t>>, visit: &mut dyn FnMut(Node<'t>)) {
    for node in nodes {
        expr(node, visit);
    }
}

fn args<'t>(args: &'t [CallArg<'t>], visit: &mut dyn FnMut(Node<'t>)) {
    for arg in args {
        match arg {
            CallArg::Pos(value)
            | CallArg::Kwarg(_, value)
            | CallArg::PosSplat(value)
            | CallArg::KwargSplat(value) => {
                expr(value, visit);
            }
        }
    }
}

fn expr<'t>(node: &'t Expr<'t>, visit: &mut dyn FnMut(Node<'t>)) {
    visit(Node::Expr(node));
    match node {
        Expr::Var(_) | Expr::Const(_) => {}
        Expr::Slice(node) => {
            expr(&node.expr, visit);
            exprs(
                [&node.start, &node.stop, &node.step].into_iter().flatten(),
                visit,
            );
        }
        Expr::UnaryOp(node) => expr(&node.expr, visit),
        Expr::BinOp(node) => exprs([&node.left, &node.right], visit),
        Expr::Compare(node) => {
            expr(&node.expr, visit);
            exprs(node.ops.iter().map(|op| &op.expr), visit);
        }
        Expr::IfExpr(node) => {
            exprs([&node.test_expr, &node.true_expr], visit);
            exprs(node.false_expr.as_ref(), visit);
        }
        Expr::Filter(node) => {
            exprs(node.expr.as_ref(), visit);
            args(&node.args, visit);
        }
        Expr::Test(node) => {
            expr(&node.expr, visit);
            args(&node.args, visit);
        }
        Expr::GetAttr(node) => expr(&node.expr, visit),
        Expr::GetItem(node) => exprs([&node.expr, &node.subscript_expr], visit),
        Expr::Call(node) => {
            expr(&node.expr, visit);
            args(&node.args, visit);
        }
        Expr::List(node) => exprs(&node.items, visit),
        Expr::Map(node) => {
            for (key, value) in node.keys.iter().zip(&node.values) {
                exprs([key, value], visit);
            }
        }
    }
}
