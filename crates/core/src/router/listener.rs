//! Changes of the router that other components follow.

use std::time::Duration;

use crate::block::BlockHashes;
use crate::fleet::FleetMember;
use crate::worker::WorkerId;

/// Receives changes of the router. The methods must be fast.
pub trait RouterListener: Send + Sync {
    /// Handles a worker that answered with an overload status and is avoided for this time.
    fn on_overloaded(&self, _worker: WorkerId, _time: Duration) {}

    /// Handles prompts that were accepted by a rank whose cache is predicted.
    fn on_routed(&self, _member: &FleetMember, _prompts: &[BlockHashes]) {}
}

/// Ignores all changes.
impl RouterListener for () {}
