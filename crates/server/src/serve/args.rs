//! Flags of `serve`. Besides the configuration file, they include the flags that gateway charts and
//! the Gateway API conformance tests pass to an endpoint picker.

use std::path::{Path, PathBuf};

use clap::Args;
use thiserror::Error;
use warmroute_settings::DurationSetting;

use crate::config::{LogFormat, LogLevel, ServeFlags};

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
    /// Name of the InferencePool whose pods are the workers, unless the file configures other
    /// workers
    #[arg(long, value_name = "NAME")]
    pub pool_name: Option<String>,
    /// Namespace of the pool; default: the namespace of this pod
    #[arg(long, value_name = "NAME")]
    pub pool_namespace: Option<String>,
    /// Port of ext_proc on all addresses; overrides `listeners.ext_proc.address`
    #[arg(long, value_name = "PORT")]
    pub grpc_port: Option<u16>,
    /// Port of the gRPC health service on all addresses; overrides
    /// `listeners.ext_proc.health_address`
    #[arg(long, value_name = "PORT")]
    pub grpc_health_port: Option<u16>,
    /// Serve ext_proc with TLS. Without a configured certificate, a self-signed one is created at
    /// start
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub secure_serving: Option<bool>,
    /// Directory with the certificate of ext_proc: tls.crt and tls.key
    #[arg(long, value_name = "DIR")]
    pub cert_path: Option<PathBuf>,
    /// Ignored: certificates are always reloaded when their files change
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_cert_reload: Option<bool>,
    /// Ignored: the gRPC health service is always offered beside ext_proc
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub health_checking: Option<bool>,
    /// Time to continue serving after the stop signal; overrides `process.drain.grace_period`
    #[arg(long, value_name = "TIME")]
    pub drain_timeout: Option<DurationSetting>,
    /// Port of the admin pages; their address stays that of `listeners.admin.address`
    #[arg(long, value_name = "PORT")]
    pub metrics_port: Option<u16>,
    /// Log format: json or console
    #[arg(long, value_name = "FORMAT", value_parser = parse_log_format)]
    pub zap_encoder: Option<LogFormat>,
    /// Log verbosity: 0 to 3 info, 4 debug, 5 and above trace
    #[arg(long = "v", short = 'v', value_name = "LEVEL")]
    pub verbosity: Option<u8>,
}

/// Configuration file of commands that name none, in the working directory.
pub const DEFAULT_CONFIG_FILE: &str = "warmroute.yaml";

/// Error for a command line without a configuration file and without a pool.
#[derive(Debug, Error)]
#[error(
    "there is no {DEFAULT_CONFIG_FILE} here; name a configuration FILE, or set --pool-name NAME to serve an \
    InferencePool by load only"
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
        match &self.pool_name {
            Some(_) => Ok(None),
            None if default.is_file() => Ok(Some(default)),
            None => Err(ServeSourceError),
        }
    }

    /// Returns the flags that override the configuration file.
    pub fn flags(&self) -> ServeFlags {
        ServeFlags {
            pool_name: self.pool_name.clone(),
            pool_namespace: self.pool_namespace.clone(),
            grpc_port: self.grpc_port,
            grpc_health_port: self.grpc_health_port,
            secure_serving: self.secure_serving,
            // A relative path is relative to the working directory, not to the configuration file.
            cert_dir: self
                .cert_path
                .as_ref()
                .map(|dir| std::path::absolute(dir).unwrap_or_else(|_| dir.clone())),
            drain_grace: self.drain_timeout,
            metrics_port: self.metrics_port,
            log_format: self.zap_encoder,
            log_level: self.verbosity.map(log_level),
        }
    }
}

fn parse_log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "json" => Ok(LogFormat::Json),
        "console" => Ok(LogFormat::Text),
        _ => Err("expected json or console".to_owned()),
    }
}

/// Maps the verbosity of gateway charts to a log level. Their default is 2; 4 is for debugging.
fn log_level(verbosity: u8) -> LogLevel {
    match verbosity {
        0..=3 => LogLevel::Info,
        4 => LogLevel::Debug,
        5.. => LogLevel::Trace,
    }
}
