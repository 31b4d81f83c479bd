//! The command line, and the only place that reads the environment.

mod serve;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};

use crate::config::LogLevel;
pub use serve::ServeArgs;

/// Routes every LLM request to the worker whose KV cache is already warm for it.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads the command line of this process; what is wrong with it ends the process with a message.
    pub fn of_process() -> Self {
        let args = std::env::args_os();
        Self::read(args).unwrap_or_else(|error| error.exit())
    }

    /// Reads a command line.
    pub fn read(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(serve::with_command(serve::without_logger_flags(args)))
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Says what running processes foresaw and what came of it: hit rate, tokens saved, and why the others were missed
    Audit(AuditArgs),
    /// Checks a configuration and loads what `serve` would load: prints it with every default filled in, or each mistake with
    /// its line
    Check(CheckArgs),
    /// Looks at a deployment from outside: engines, their events, Envoy, this machine. Each finding with its mend; the exit
    /// code is 0 where all is well, 1 for warnings, 2 for errors
    Doctor(DoctorArgs),
    /// Says why a request would go where it would go: per worker rank what is cached, what it is busy with, every term of
    /// its cost, or why it is excluded
    Explain(ExplainArgs),
    /// Serves until SIGTERM or SIGINT; SIGHUP reads the configuration again
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

/// Whose figures.
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// The admin pages of the running process
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9901")]
    pub admin: String,
    /// The file with the token that the admin pages ask for
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// CA certificate file (PEM) of the admin pages; by default the CAs that the system trusts
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// What a million prompt tokens cost, to say what the saved ones are worth
    #[arg(long, value_name = "PRICE", value_parser = price)]
    pub price: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Which deployment to look at, and how.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The configuration file
    #[arg(long, short, value_name = "FILE")]
    pub config: PathBuf,
    /// Envoy's admin page; by default `envoy.admin` of the configuration
    #[arg(long, value_name = "URL", value_parser = page)]
    pub envoy_admin: Option<String>,
    /// CA certificate file (PEM) of Envoy's admin page; by default the CAs that the system trusts
    #[arg(long, value_name = "FILE")]
    pub envoy_ca_file: Option<PathBuf>,
    /// Send the engines no completion. By default each rank gets two of some hundred tokens, to see whether its events come
    #[arg(long)]
    pub no_canary: bool,
    /// How long answers, events and publishers are waited for
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub patience: humantime::Duration,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn price(text: &str) -> Result<f64, String> {
    let price: f64 = text
        .parse()
        .map_err(|_| format!("`{text}` is not a number"))?;
    if price.is_finite() && price >= 0.0 {
        Ok(price)
    } else {
        Err("a price is at least 0".to_owned())
    }
}

/// What to explain, and who is asked.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The configuration file; not needed where a running process is asked
    #[arg(long, short, value_name = "FILE", required_unless_present = "admin")]
    pub config: Option<PathBuf>,
    /// The request's body; `-` is standard input
    #[arg(long, short, value_name = "FILE")]
    pub body: PathBuf,
    /// The request's path; by default /v1/chat/completions, or /v1/completions where the body has a prompt
    #[arg(long)]
    pub path: Option<String>,
    /// Pool of the request, as `confine.authority` or Envoy's dynamic metadata would select it
    #[arg(long, value_name = "POOL")]
    pub pool: Option<Arc<str>>,
    /// A header of the request; may be repeated
    #[arg(long = "header", short = 'H', value_name = "NAME=VALUE", value_parser = header)]
    pub headers: Vec<(String, String)>,
    /// Ask the running process with these admin pages, which knows the caches and the load; else only the configuration
    #[arg(long, value_name = "URL")]
    pub admin: Option<String>,
    /// The file with the token that the admin pages ask for
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub token_file: Option<PathBuf>,
    /// CA certificate file (PEM) of the admin pages; by default the CAs that the system trusts
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub ca_file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn page(url: &str) -> Result<String, String> {
    let page = url.starts_with("http://") || url.starts_with("https://");
    page.then(|| url.to_owned())
        .ok_or_else(|| "write for example http://127.0.0.1:9900".to_owned())
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once('=')
        .ok_or("a header is written NAME=VALUE")?;
    let name = name.trim();
    if name.is_empty() {
        Err("the header has no name".to_owned())
    } else {
        Ok((name.to_lowercase(), value.trim().to_owned()))
    }
}

/// The filter of the log: `RUST_LOG` where it is set, else the level of the configuration.
pub fn log_filter(level: LogLevel) -> String {
    #[expect(
        clippy::disallowed_methods,
        reason = "this module is the one that reads the environment"
    )]
    let asked = std::env::var("RUST_LOG");
    // The listener logs a refused server name itself, with the fix and a limit. Discovery logs each failure of the API server once,
    // with its cause; the library logs every request.
    let by_level = || format!("{},rustls::msgs=error,kube_client=off", level.as_str());
    asked
        .ok()
        .filter(|filter| !filter.is_empty())
        .unwrap_or_else(by_level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_needs_a_configuration() {
        assert!(Cli::try_parse_from(["warmroute", "check"]).is_err());
        assert!(Cli::try_parse_from(["warmroute"]).is_err());
        let cli = Cli::try_parse_from(["warmroute", "check", "--config", "w.yaml"]).unwrap();
        let Command::Check(args) = cli.command else {
            panic!("another command")
        };
        assert_eq!(args.serve.config, Some(PathBuf::from("w.yaml")));
    }

    #[test]
    fn a_doctor_needs_a_configuration_and_pages_have_addresses() {
        let doctor =
            |more: &[&str]| Cli::try_parse_from(["warmroute", "doctor"].iter().chain(more));
        let Command::Doctor(args) = doctor(&["--config", "w.yaml"]).unwrap().command else {
            panic!("another command")
        };
        let patience: std::time::Duration = args.patience.into();
        assert_eq!(
            (args.envoy_admin, args.no_canary, args.json),
            (None, false, false)
        );
        assert_eq!(patience, std::time::Duration::from_secs(5));
        for refused in [
            &[][..],
            &["--config", "w", "--envoy-admin", "localhost:9900"],
            &["--config", "w", "--patience", "x"],
        ] {
            assert!(doctor(refused).is_err(), "{refused:?}");
        }
    }

    fn explain(more: &[&str]) -> Result<ExplainArgs, clap::Error> {
        let cli = Cli::try_parse_from(["warmroute", "explain"].iter().chain(more))?;
        let Command::Explain(args) = cli.command else {
            panic!("another command")
        };
        Ok(args)
    }

    #[test]
    fn an_explanation_needs_a_body_and_a_configuration_or_somebody_to_ask() {
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
            "nobody is asked"
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
