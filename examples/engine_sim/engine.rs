//! wip
#[path = "engine/cache.rs"]
pub(crate) mod cache;
#[path = "engine/scheduler.rs"]
pub(crate) mod scheduler;
