//! Flags of `serve`. Besides the configuration file, they include the flags that gateway charts and
//! the Gateway API conformance tests pass to an endpoint picker.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use warmroute_settings::DurationSetting;

use crate::config::{Flags, LogFormat, LogLevel};

/// Arguments of `serve`. Flags override the configuration file.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The configuration file. Without one, the pool is served by load only, as in gateway
    /// conformance tests
    #[arg(
        long,
        short,
        value_name = "FILE",
        required_unless_present = "pool_name"
    )]
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
    #[arg(long, value_name = "FORM", value_parser = parse_log_format)]
    pub zap_encoder: Option<LogFormat>,
    /// Log verbosity: 0 to 3 info, 4 debug, 5 and above trace
    #[arg(long = "v", short = 'v', value_name = "LEVEL")]
    pub verbosity: Option<u8>,
}

impl ServeArgs {
    /// Returns the flags that override the configuration file.
    pub fn flags(&self) -> Flags {
        Flags {
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

/// Inserts `serve` if the command line begins with a flag, because endpoint pickers are started
/// without a subcommand.
pub(super) fn with_default_command(args: Vec<OsString>) -> Vec<OsString> {
    let global_flags = ["-h", "--help", "-V", "--version"];
    let first = args.get(1).map(|first| first.to_string_lossy());
    let is_flag =
        first.is_some_and(|first| first.starts_with('-') && !global_flags.contains(&&*first));
    let command = is_flag.then(|| OsString::from("serve"));
    let mut args = args.into_iter();
    args.next().into_iter().chain(command).chain(args).collect()
}

/// Removes unsupported flags of the Go logger: `--zap-*` with their values.
pub(super) fn strip_zap_flags(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut retained = Vec::new();
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let text = arg.to_string_lossy();
        let is_unsupported = text.starts_with("--zap-")
            && !(text == "--zap-encoder" || text.starts_with("--zap-encoder="));
        if !is_unsupported {
            retained.push(arg);
        } else if !text.contains('=') {
            let _value = args.next_if(|next| !next.to_string_lossy().starts_with('-'));
        }
    }
    retained
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::cli::{Cli, Command};

    fn serve(more: &[&str]) -> Result<Flags, clap::Error> {
        let args = ["warmroute", "serve", "--config", "w.yaml"]
            .iter()
            .chain(more)
            .map(OsString::from);
        let Command::Serve(args) = Cli::parse_args(args)?.command else {
            panic!("unexpected command")
        };
        assert_eq!(args.config, Some(PathBuf::from("w.yaml")));
        Ok(args.flags())
    }

    #[test]
    fn flags_without_command_mean_serve() {
        let read =
            |args: &[&str]| Cli::parse_args(["warmroute"].iter().chain(args).map(OsString::from));
        let Command::Serve(args) = read(&["--zap-devel", "--pool-name", "p", "--v", "4"])
            .unwrap()
            .command
        else {
            panic!("unexpected command")
        };
        assert_eq!(
            (
                args.config.as_ref(),
                args.pool_name.as_deref(),
                args.verbosity
            ),
            (None, Some("p"), Some(4))
        );
        assert!(matches!(
            read(&["-c", "w.yaml"]).unwrap().command,
            Command::Serve(_)
        ));
        assert!(matches!(
            read(&["check", "-c", "w.yaml"]).unwrap().command,
            Command::Check(_)
        ));
        for (args, kind) in [
            (
                &[][..],
                clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
            ),
            (&["--help"], clap::error::ErrorKind::DisplayHelp),
            (&["--version"], clap::error::ErrorKind::DisplayVersion),
            (
                &["--grpc-port", "9002"],
                clap::error::ErrorKind::MissingRequiredArgument,
            ),
        ] {
            assert_eq!(read(args).unwrap_err().kind(), kind, "{args:?}");
        }
    }

    #[test]
    fn chart_and_conformance_flags_are_parsed() {
        assert_eq!(serve(&[]).unwrap(), Flags::default());
        let given = [
            "--pool-name",
            "vllm",
            "--pool-namespace=inference",
            "--grpc-port",
            "9002",
            "--grpc-health-port=9003",
            "--metrics-port=9090",
            "--secure-serving",
            "--cert-path",
            "/certs",
            "--enable-cert-reload",
            "--health-checking=true",
            "--drain-timeout",
            "1m30s",
            "--zap-devel",
            "--zap-log-level",
            "debug",
            "--zap-time-encoding=iso8601",
            "--zap-encoder",
            "json",
            "--zap-devel=false",
            "-v",
            "4",
        ];
        let expected = Flags {
            pool_name: Some("vllm".to_owned()),
            pool_namespace: Some("inference".to_owned()),
            grpc_port: Some(9002),
            grpc_health_port: Some(9003),
            metrics_port: Some(9090),
            secure_serving: Some(true),
            cert_dir: Some("/certs".into()),
            drain_grace: Some(DurationSetting::seconds(90)),
            log_format: Some(LogFormat::Json),
            log_level: Some(LogLevel::Debug),
        };
        assert_eq!(serve(&given).unwrap(), expected);
    }

    #[test]
    fn verbosity_and_encoder_spellings_are_parsed() {
        type Case<'a> = (&'a [&'a str], Option<LogLevel>, Option<LogFormat>);
        let cases: [Case<'_>; 6] = [
            (&["--v=1"], Some(LogLevel::Info), None),
            (&["--v", "3"], Some(LogLevel::Info), None),
            (&["-v=5"], Some(LogLevel::Trace), None),
            (&["-v9"], Some(LogLevel::Trace), None),
            (&["--zap-encoder=console"], None, Some(LogFormat::Text)),
            (
                &["--zap-stacktrace-level", "error", "--zap-encoder=json"],
                None,
                Some(LogFormat::Json),
            ),
        ];
        for (given, level, format) in cases {
            let flags = serve(given).unwrap();
            assert_eq!(
                (flags.log_level, flags.log_format),
                (level, format),
                "{given:?}"
            );
        }
        for wrong in [
            &["--zap-encoder", "xml"][..],
            &["--grpc-port", "70000"],
            &["--unknown"],
            &["--v", "much"],
        ] {
            assert!(serve(wrong).is_err(), "{wrong:?}");
        }
    }
}
