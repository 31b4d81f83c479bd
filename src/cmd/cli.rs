//! Command line, and the only module that reads environment variables.

mod endpoint_picker;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};

use warmroute_server::serve::ServeArgs;

/// Routes every LLM request to the worker whose KV cache is already warm for it.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// Subcommand.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Parses the arguments of this process. Prints a message and exits on an error.
    pub fn from_env_args() -> Self {
        let args = std::env::args_os();
        Self::parse_args(args).unwrap_or_else(|error| error.exit())
    }

    /// Parses a command line.
    pub fn parse_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(endpoint_picker::with_default_command(
            endpoint_picker::strip_zap_flags(args),
        ))
    }
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows predicted against actual cache hits of a running process: hit rate, saved tokens, and
    /// causes of misses
    Audit(AuditArgs),
    /// Validates a configuration and loads the tokenizers as `serve` does. Prints the resolved
    /// configuration, or every error with its line
    Check(CheckArgs),
    /// Verifies a deployment: engines, KV events, Envoy and this machine. Each problem comes with a
    /// fix. Exit code: 0 ok, 1 warnings, 2 errors
    Doctor(DoctorArgs),
    /// Explains the route of a request: for each worker rank its cached blocks, its load, every
    /// term of its cost, or the reason why it is excluded
    Explain(ExplainArgs),
    /// Serves until SIGTERM or SIGINT. SIGHUP reloads the configuration
    Serve(ServeArgs),
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The configuration file and the flags of `serve`
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Do not load tokenizers and chat templates
    #[arg(long)]
    pub fast: bool,
}

/// Arguments of `audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Admin address of the running process
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9901")]
    pub admin: String,
    /// File with the bearer token of the admin pages
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// CA certificate file (PEM) for the admin pages; default: the CAs of the system
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Price of a million prompt tokens, to show the value of the saved ones
    #[arg(long, value_name = "PRICE", value_parser = parse_price)]
    pub price: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The configuration file
    #[arg(long, short, value_name = "FILE")]
    pub config: PathBuf,
    /// Envoy's admin address; default: `envoy.admin_url` of the configuration
    #[arg(long, value_name = "URL", value_parser = parse_url)]
    pub envoy_admin: Option<String>,
    /// CA certificate file (PEM) for Envoy's admin address; default: the CAs of the system
    #[arg(long, value_name = "FILE")]
    pub envoy_ca_file: Option<PathBuf>,
    /// Send no canary completions. By default each rank gets two of a few hundred tokens, to verify
    /// its KV events
    #[arg(long)]
    pub no_canary: bool,
    /// Timeout for responses, KV events and publishers
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub timeout: humantime::Duration,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn parse_price(text: &str) -> Result<f64, String> {
    let price: f64 = text
        .parse()
        .map_err(|_| format!("`{text}` is not a number"))?;
    if price.is_finite() && price >= 0.0 {
        Ok(price)
    } else {
        Err("the price must be at least 0".to_owned())
    }
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The configuration file; not needed with --admin
    #[arg(long, short, value_name = "FILE", required_unless_present = "admin")]
    pub config: Option<PathBuf>,
    /// Request body; `-` for standard input
    #[arg(long, short, value_name = "FILE")]
    pub body: PathBuf,
    /// Request path; default: /v1/chat/completions, or /v1/completions if the body has a prompt
    #[arg(long)]
    pub path: Option<String>,
    /// Pool of the request, as `routing.pool_routes.authorities` or Envoy's dynamic metadata would
    /// select it
    #[arg(long, value_name = "POOL")]
    pub pool: Option<Arc<str>>,
    /// Request header; may be repeated
    #[arg(long = "header", short = 'H', value_name = "NAME=VALUE", value_parser = parse_header)]
    pub headers: Vec<(String, String)>,
    /// Admin address of a running process, which knows the caches and the load. Without it, only
    /// the configuration is used
    #[arg(long, value_name = "URL")]
    pub admin: Option<String>,
    /// File with the bearer token of the admin pages
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub token_file: Option<PathBuf>,
    /// CA certificate file (PEM) for the admin pages; default: the CAs of the system
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub ca_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn parse_url(url: &str) -> Result<String, String> {
    let has_scheme = url.starts_with("http://") || url.starts_with("https://");
    has_scheme
        .then(|| url.to_owned())
        .ok_or_else(|| "expected a URL, for example http://127.0.0.1:9900".to_owned())
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    let name = name.trim();
    if name.is_empty() {
        Err("the header has no name".to_owned())
    } else {
        Ok((name.to_lowercase(), value.trim().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn check_requires_a_configuration() {
        assert!(Cli::try_parse_from(["warmroute", "check"]).is_err());
        assert!(Cli::try_parse_from(["warmroute"]).is_err());
        let cli = Cli::try_parse_from(["warmroute", "check", "--config", "w.yaml"]).unwrap();
        let Command::Check(args) = cli.command else {
            panic!("unexpected command")
        };
        assert_eq!(args.serve.config, Some(PathBuf::from("w.yaml")));
    }

    #[test]
    fn doctor_requires_configuration_and_valid_urls() {
        let doctor =
            |more: &[&str]| Cli::try_parse_from(["warmroute", "doctor"].iter().chain(more));
        let Command::Doctor(args) = doctor(&["--config", "w.yaml"]).unwrap().command else {
            panic!("unexpected command")
        };
        let timeout: std::time::Duration = args.timeout.into();
        assert_eq!(
            (args.envoy_admin, args.no_canary, args.json),
            (None, false, false)
        );
        assert_eq!(timeout, std::time::Duration::from_secs(5));
        for refused in [
            &[][..],
            &["--config", "w", "--envoy-admin", "localhost:9900"],
            &["--config", "w", "--timeout", "x"],
        ] {
            assert!(doctor(refused).is_err(), "{refused:?}");
        }
    }

    fn explain(more: &[&str]) -> Result<ExplainArgs, clap::Error> {
        let cli = Cli::try_parse_from(["warmroute", "explain"].iter().chain(more))?;
        let Command::Explain(args) = cli.command else {
            panic!("unexpected command")
        };
        Ok(args)
    }

    #[test]
    fn explain_requires_body_and_config_or_admin() {
        let args = explain(&[
            "--config",
            "w.yaml",
            "--body",
            "-",
            "--header",
            "X-Prio = a=b",
            "-H",
            "y=2",
        ])
        .unwrap();
        assert_eq!(args.config, Some(PathBuf::from("w.yaml")));
        assert_eq!(
            args.headers,
            [
                ("x-prio".to_owned(), "a=b".to_owned()),
                ("y".to_owned(), "2".to_owned())
            ]
        );
        assert_eq!((args.path, args.admin, args.json), (None, None, false));
        let args = explain(&[
            "--admin",
            "http://h:1",
            "--body",
            "b",
            "--path",
            "/v1/completions",
            "--json",
        ])
        .unwrap();
        assert_eq!(
            (args.config, args.admin.as_deref(), args.json),
            (None, Some("http://h:1"), true)
        );
        assert!(
            explain(&["--config", "w", "--body", "b", "--token-file", "t"]).is_err(),
            "--token-file requires --admin"
        );
        let args = explain(&["--admin", "http://h:1", "--body", "b", "--token-file", "t"]).unwrap();
        assert_eq!(args.token_file, Some(PathBuf::from("t")));
        for missing in [
            &["--body", "b"][..],
            &["--config", "w"],
            &["--config", "w", "--body", "b", "--header", "novalue"],
        ] {
            assert!(explain(missing).is_err(), "{missing:?}");
        }
        assert!(explain(&["--config", "w", "--body", "b", "--header", "=v"]).is_err());
    }
}
