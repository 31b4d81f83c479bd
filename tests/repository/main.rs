//! Architecture rules of the repository.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod docs;
mod key_table;
mod schema;
mod tidy;
