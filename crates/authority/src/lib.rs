//! An HTTP/2 connection layer that makes every :authority acceptable to the h2 crate.
