//! Flags of `serve`. Besides the configuration file, they include the flags that gateway charts and
//! the Gateway API conformance tests pass to an endpoint picker.

use std::path::{Path, PathBuf};

use clap::Args;
use thiserror::Error;

use crate::config::ServeFlags;

/// Arguments of `serve`. Flags override the configuration file.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The configuration file. It has priority over --config. Default: warmroute.yaml in the
    /// working directory
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The configuration file. Without a file, requests to the pool of --pool-name are routed by
    /// load only
    #[arg(long, short, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Flags that override the configuration file.
    #[command(flatten)]
    pub flags: ServeFlags,
    /// Ignored: certificates are always reloaded when their files change
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_cert_reload: Option<bool>,
    /// Ignored: the gRPC health service is always offered beside ext_proc
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub health_checking: Option<bool>,
}

/// Configuration file of commands that name none, in the working directory.
pub const DEFAULT_CONFIG_FILE: &str = "warmroute.yaml";

/// Error for a command line without a configuration file and without a pool.
#[derive(Debug, Error)]
#[error(
    "there is no {DEFAULT_CONFIG_FILE} here; name a configuration FILE, or set --pool-name NAME to \
    serve an InferencePool by load only"
)]
pub struct ServeSourceError;

impl ServeArgs {
    /// Returns the configuration file, or `None` if the command line names a pool only. Fails if it
    /// names neither, and the default file does not exist.
    pub fn config_file(&self) -> Result<Option<&Path>, ServeSourceError> {
        // The positional file has priority over the environment variable of `--config`.
        if let Some(file) = self.file.as_deref().or(self.config.as_deref()) {
            return Ok(Some(file));
        }
        let default = Path::new(DEFAULT_CONFIG_FILE);
        match &self.flags.pool_name {
            Some(_) => Ok(None),
            None if default.is_file() => Ok(Some(default)),
            None => Err(ServeSourceError),
        }
    }
}
