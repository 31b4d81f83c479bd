//! Command line.

mod endpoint_picker;
mod values;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use warmroute_server::serve::{DEFAULT_CONFIG_FILE, ServeArgs};

use values::{parse_admin_url, parse_engine_address, parse_header, parse_price, parse_url};

/// Admin address of a process with the default configuration.
const DEFAULT_ADMIN: &str = "http://127.0.0.1:9005";
const EXIT_CODES: &str = "Exit codes: 0 success, 1 failure, 2 invalid configuration or arguments";
const DOCTOR_EXIT_CODES: &str =
    "Exit codes: 0 no problems, 1 warnings, 2 errors or an invalid configuration";
const SERVE_USAGE: &str = "warmroute serve [OPTIONS] [FILE]";
const CHECK_USAGE: &str = "warmroute check [OPTIONS] [FILE | -]";
const EXPLAIN_USAGE: &str =
    "warmroute explain (--admin <URL> | --config <FILE>) --body <FILE> [OPTIONS]";

/// Routes each LLM request to the worker that has cached most of its prompt, weighed against load.
#[derive(Debug, Parser)]
#[command(version = crate::VERSION.text, after_help = EXIT_CODES)]
pub struct Cli {
    /// Subcommand.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// Environment variables of options: the subcommand, the option and the variable.
const VARIABLES: [(&str, &str, &str); 4] = [
    ("audit", "admin", "WARMROUTE_ADMIN"),
    ("check", "config", "WARMROUTE_CONFIG"),
    ("doctor", "config", "WARMROUTE_CONFIG"),
    ("serve", "config", "WARMROUTE_CONFIG"),
];

impl Cli {
    /// Parses the arguments and the environment of this process. Prints a message and exits on an
    /// error.
    pub fn from_env_args() -> Self {
        Self::parse_with(command_with_environment(), std::env::args_os())
            .unwrap_or_else(|error| error.exit())
    }

    /// Parses a command line without the environment.
    pub fn parse_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::parse_with(Self::command(), args)
    }

    fn parse_with(
        command: clap::Command,
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<Self, clap::Error> {
        let args = endpoint_picker::with_default_command(endpoint_picker::strip_zap_flags(args));
        Self::from_arg_matches(&command.try_get_matches_from(args)?)
    }
}

/// Returns the command line with the environment variables of its options. An empty variable counts
/// as unset, because manifests write it for an optional value.
#[expect(
    clippy::disallowed_methods,
    reason = "the environment sets options of the command line"
)]
pub fn command_with_environment() -> clap::Command {
    let is_empty = |name: &str| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let variables = VARIABLES.into_iter().filter(|(_, _, name)| !is_empty(name));
    variables.fold(Cli::command(), |command, (subcommand, option, name)| {
        command.mut_subcommand(subcommand, |subcommand| {
            subcommand.mut_arg(option, |option| option.env(name))
        })
    })
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Shows predicted against actual cache hits of a running process: hit rate, saved tokens, and
    /// causes of misses
    Audit(AuditArgs),
    /// Validates a configuration and loads the tokenizers as `serve` does. Prints all errors with
    /// their lines, and a summary. Ports are not opened, because a running process may use them
    Check(CheckArgs),
    /// Prints a completion script for a shell
    Completions(CompletionsArgs),
    /// Writes a first configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Verifies a deployment: engines, KV events, Envoy and this machine. Each problem comes with a
    /// fix
    Doctor(DoctorArgs),
    /// Explains the route of a request: the best workers with their cached tokens, load and cost
    Explain(ExplainArgs),
    /// Writes the manual pages to a directory
    Man(ManArgs),
    /// Serves until SIGTERM or SIGINT. SIGHUP reloads the configuration
    #[command(override_usage = SERVE_USAGE, after_help = EXIT_CODES)]
    Serve(ServeArgs),
}

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(override_usage = CHECK_USAGE, after_help = EXIT_CODES)]
pub struct CheckArgs {
    /// The configuration file, `-` for standard input, and the flags of `serve`
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Do not load tokenizers and chat templates
    #[arg(long)]
    pub fast: bool,
    /// Print the resolved configuration, with all defaults
    #[arg(long)]
    pub print: bool,
    /// Print only errors
    #[arg(long, short, conflicts_with = "print")]
    pub quiet: bool,
    /// Print the result as JSON
    #[arg(long, conflicts_with = "print")]
    pub json: bool,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The directory; created if it does not exist
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// Subcommands of `config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Writes a commented configuration for one model
    Init(ConfigInitArgs),
    /// Prints the JSON Schema of the configuration, for completion and checks in editors
    Schema(ConfigSchemaArgs),
}

/// Arguments of `config schema`.
#[derive(Debug, Args)]
pub struct ConfigSchemaArgs {
    /// Print the schema of the workers file
    #[arg(long)]
    pub workers: bool,
}

/// Arguments of `config init`. On a terminal, the command prompts for a missing model, directory and
/// addresses.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct ConfigInitArgs {
    /// Name of the model, as the engines serve it
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Directory with tokenizer.json, tokenizer_config.json and config.json of the model
    #[arg(long, value_name = "DIR")]
    pub model_dir: Option<PathBuf>,
    /// Engine of the model
    #[arg(long, value_enum)]
    pub engine: Option<InitEngine>,
    /// Address of an engine, as IP:PORT; may be repeated
    #[arg(long = "worker", value_name = "IP:PORT", value_parser = parse_engine_address)]
    pub workers: Vec<SocketAddr>,
    /// InferencePool whose pods are the workers, instead of addresses
    #[arg(long, value_name = "NAME", conflicts_with = "workers")]
    pub pool: Option<String>,
    /// DNS name whose addresses are the workers, as NAME:PORT, instead of addresses
    #[arg(long, value_name = "NAME:PORT", conflicts_with_all = ["workers", "pool"])]
    pub dns: Option<String>,
    /// Tokens per KV block of the engines
    #[arg(long, value_name = "TOKENS")]
    pub block_size: Option<NonZeroU32>,
    /// First port of the KV events of each engine
    #[arg(long, value_name = "PORT")]
    pub kv_events_port: Option<u16>,
    /// The file to write, `-` for standard output. An existing file is not overwritten
    #[arg(long, short, value_name = "FILE", default_value = DEFAULT_CONFIG_FILE)]
    pub output: PathBuf,
}

/// Engines that `config init` configures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum InitEngine {
    /// vLLM
    Vllm,
    /// SGLang
    Sglang,
}

/// Arguments of `audit`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct AuditArgs {
    /// Admin address of the running process
    #[arg(
        long,
        value_name = "URL",
        default_value = DEFAULT_ADMIN,
        value_parser = parse_admin_url
    )]
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
#[command(after_help = DOCTOR_EXIT_CODES)]
pub struct DoctorArgs {
    /// The configuration file. It has priority over --config. Default: warmroute.yaml in the
    /// working directory
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The configuration file
    #[arg(long, short, value_name = "FILE")]
    pub config: Option<PathBuf>,
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
    /// Print one line per check and subject
    #[arg(long)]
    pub verbose: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl DoctorArgs {
    /// Returns the configuration file.
    pub fn config_file(&self) -> &Path {
        let named = self.file.as_deref().or(self.config.as_deref());
        named.unwrap_or(Path::new(DEFAULT_CONFIG_FILE))
    }
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
#[command(override_usage = EXPLAIN_USAGE, after_help = EXIT_CODES)]
pub struct ExplainArgs {
    /// The configuration file; not needed with --admin
    #[arg(long, short, value_name = "FILE")]
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
    #[arg(long = "header", short = 'H', value_name = "NAME: VALUE", value_parser = parse_header)]
    pub headers: Vec<(String, String)>,
    /// Admin address of a running process, which knows the caches and the load. Without it, only
    /// the configuration is used
    #[arg(long, value_name = "URL", value_parser = parse_admin_url)]
    pub admin: Option<String>,
    /// File with the bearer token of the admin pages
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub token_file: Option<PathBuf>,
    /// CA certificate file (PEM) for the admin pages; default: the CAs of the system
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub ca_file: Option<PathBuf>,
    /// Print all workers with every term of their costs
    #[arg(long)]
    pub table: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "table")]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_well_formed() {
        command_with_environment().debug_assert();
    }

    #[test]
    fn check_accepts_file_as_position_or_option() {
        assert!(Cli::try_parse_from(["warmroute"]).is_err());
        let check = |more: &[&str]| {
            let cli = Cli::try_parse_from(["warmroute", "check"].iter().chain(more))?;
            let CliCommand::Check(args) = cli.command else {
                panic!("unexpected command")
            };
            Ok::<_, clap::Error>((args.serve.file, args.serve.config))
        };
        let file = || Some(PathBuf::from("w.yaml"));
        assert_eq!(check(&["w.yaml"]).unwrap(), (file(), None));
        assert_eq!(check(&["--config", "w.yaml"]).unwrap(), (None, file()));
        // `--config` may come from the environment, so both together are valid.
        assert!(check(&["w.yaml", "--config", "w.yaml"]).is_ok());
        assert!(check(&["w.yaml", "--json", "--print"]).is_err());
    }

    #[test]
    fn serve_and_doctor_accept_file_by_position() {
        let parse = |words: &[&str]| {
            let words = ["warmroute"].iter().chain(words);
            Cli::try_parse_from(words).unwrap().command
        };
        let CliCommand::Serve(args) = parse(&["serve", "w.yaml", "--config", "other.yaml"]) else {
            panic!("unexpected command")
        };
        assert_eq!(args.config_file().unwrap(), Some(Path::new("w.yaml")));
        let CliCommand::Serve(args) = parse(&["serve", "--pool-name", "p"]) else {
            panic!("unexpected command")
        };
        assert_eq!(args.config_file().unwrap(), None);
        for (words, file) in [
            (&["doctor", "w.yaml"][..], "w.yaml"),
            (&["doctor", "--config", "w.yaml"], "w.yaml"),
            (&["doctor"], "warmroute.yaml"),
        ] {
            let CliCommand::Doctor(args) = parse(words) else {
                panic!("unexpected command")
            };
            assert_eq!(args.config_file(), Path::new(file));
        }
    }

    #[test]
    fn doctor_accepts_only_valid_urls_and_times() {
        let doctor =
            |more: &[&str]| Cli::try_parse_from(["warmroute", "doctor"].iter().chain(more));
        let CliCommand::Doctor(args) = doctor(&["--config", "w.yaml"]).unwrap().command else {
            panic!("unexpected command")
        };
        let timeout: std::time::Duration = args.timeout.into();
        assert_eq!(
            (args.envoy_admin, args.no_canary, args.json),
            (None, false, false)
        );
        assert_eq!(timeout, std::time::Duration::from_secs(5));
        for refused in [
            &["--config", "w", "--envoy-admin", "localhost:9900"][..],
            &["--config", "w", "--timeout", "x"],
        ] {
            assert!(doctor(refused).is_err(), "{refused:?}");
        }
    }

    fn explain(more: &[&str]) -> Result<ExplainArgs, clap::Error> {
        let cli = Cli::try_parse_from(["warmroute", "explain"].iter().chain(more))?;
        let CliCommand::Explain(args) = cli.command else {
            panic!("unexpected command")
        };
        Ok(args)
    }

    #[test]
    fn explain_requires_a_body() {
        let args = explain(&[
            "--config",
            "w.yaml",
            "--body",
            "-",
            "--header",
            "X-Prio: a=b",
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
        let args = explain(&["--admin", "127.0.0.1:9005", "--body", "b"]).unwrap();
        assert_eq!(args.admin.as_deref(), Some("http://127.0.0.1:9005"));
        for missing in [
            &["--config", "w"][..],
            &["--config", "w", "--body", "b", "--header", "novalue"],
        ] {
            assert!(explain(missing).is_err(), "{missing:?}");
        }
        assert!(explain(&["--config", "w", "--body", "b", "--header", "=v"]).is_err());
    }
}
