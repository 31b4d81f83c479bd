//! From request to tokens.
