//! Who holds which prefix, in which tier.

pub mod event;

pub use event::{KvEvent, Outcome, StoredBlock};
