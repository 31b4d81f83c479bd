//! Helpers that several test binaries use.

#![allow(dead_code, reason = "each test binary uses its own part of it")]

pub(crate) mod another;
pub(crate) mod api_server;
pub(crate) mod clients;
pub(crate) mod deployment;
pub(crate) mod manifest_set;
pub(crate) mod openmetrics;
pub(crate) mod pki;
pub(crate) mod process;

use std::path::PathBuf;

use warmroute_testbed::deployment::ModelFiles;

/// Returns the path of a file of the reduced model.
pub(crate) fn model_file(name: &str) -> PathBuf {
    ModelFiles::Reduced.path(name)
}
