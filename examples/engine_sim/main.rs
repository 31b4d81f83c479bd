//! wip
mod engine;
fn main() {}
