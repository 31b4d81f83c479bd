//! Helpers that several test binaries use.

#![allow(dead_code, reason = "each test binary uses its own part of it")]

pub(crate) mod another;
pub(crate) mod api_server;
pub(crate) mod clients;
pub(crate) mod deployment;
pub(crate) mod ext_proc;
pub(crate) mod local_server;
pub(crate) mod manifest_set;
pub(crate) mod openmetrics;
pub(crate) mod pki;
pub(crate) mod process;

use std::path::PathBuf;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warmroute_testbed::deployment::ModelFiles;

/// Raises the limit of open files to its maximum.
pub(crate) fn raise_open_file_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Returns the path of a file of the reduced model.
pub(crate) fn model_file(name: &str) -> PathBuf {
    ModelFiles::Reduced.path(name)
}
