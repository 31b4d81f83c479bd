//! Admin HTTP.
