//! Starting, supervising and draining.
