//! State of the process that the composition root provides to the admin pages.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::Value;
use warmroute_core::wall_time::WallTime;

use crate::version::BuildVersion;

/// Content of a page, computed for each request. `None` if its feature is off.
pub type StatusPage = Arc<dyn Fn() -> Option<Value> + Send + Sync>;

/// Function that returns the current state of the process.
pub type ProcessStatusSource = Arc<dyn Fn() -> ProcessStatus + Send + Sync>;

/// State of the process.
#[derive(Clone, Debug)]
pub struct ProcessStatus {
    /// Version of the program.
    pub version: BuildVersion,
    /// Start of the process.
    pub started_at: WallTime,
    /// Configuration file. `None` if the process was configured by flags.
    pub config_file: Option<PathBuf>,
    /// Generation of the configuration in use.
    pub generation: u64,
    /// Last read of the configuration file.
    pub last_reload: ReloadReport,
    /// Changed keys that take effect only after a restart.
    pub needs_restart: Vec<String>,
    /// Pool that the process serves, as `name` or `namespace/name`.
    pub pool: Option<String>,
    /// Configured models.
    pub models: Vec<ModelStatus>,
    /// Whether responses are observed for the token counts of engines.
    pub observes_usage: bool,
    /// Whether tokens are compared with the engines.
    pub checks_parity: bool,
}

/// Configured model.
#[derive(Clone, Debug)]
pub struct ModelStatus {
    /// Name.
    pub name: String,
    /// Component that tokenizes its requests. `None` if they are routed by load.
    pub tokenizer: Option<TokenizerKind>,
}

/// Component that tokenizes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenizerKind {
    /// warmroute, with the tokenizer of the model.
    Local,
    /// Engines or render servers.
    Remote,
}

/// Result of one read of the configuration file.
#[derive(Clone, Debug, Serialize)]
pub struct ReloadReport {
    /// Time of the read.
    pub time: WallTime,
    /// `started` for the read at startup, then `applied`, `unchanged` or `rejected`.
    pub outcome: &'static str,
    /// Errors of a rejected configuration.
    pub errors: Vec<String>,
}

impl ReloadReport {
    /// Creates the report of a read that ends now.
    pub fn new(outcome: &'static str, errors: Vec<String>) -> Self {
        Self {
            time: SystemTime::now().into(),
            outcome,
            errors,
        }
    }
}
