//! The flags of `serve`: beside the configuration file, those that gateways' charts and the conformance tests of the
//! Gateway API pass to an endpoint picker.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::config::{Flags, LogFormat, LogLevel};
use crate::settings::Period;

/// What to serve, and what is said over the configuration file.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The configuration file. Without one the pool is served by load alone, as gateways' conformance tests need it
    #[arg(
        long,
        short,
        value_name = "FILE",
        required_unless_present = "pool_name"
    )]
    pub config: Option<PathBuf>,
    /// Name of the pool that is served: the InferencePool whose pods are the workers, unless the file says where else they are
    #[arg(long, value_name = "NAME")]
    pub pool_name: Option<String>,
    /// Namespace of the pool; by default the one of this pod
    #[arg(long, value_name = "NAME")]
    pub pool_namespace: Option<String>,
    /// Serve ext_proc on this port of all addresses, in place of `listen.tcp`
    #[arg(long, value_name = "PORT")]
    pub grpc_port: Option<u16>,
    /// Answer for gRPC health alone on this port of all addresses, in place of `listen.health`
    #[arg(long, value_name = "PORT")]
    pub grpc_health_port: Option<u16>,
    /// Serve ext_proc by TLS, with a certificate made at start where none is given; `--secure-serving=false` does not
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub secure_serving: Option<bool>,
    /// Where the certificate of ext_proc is, as tls.crt and tls.key
    #[arg(long, value_name = "DIR")]
    pub cert_path: Option<PathBuf>,
    /// Read the certificate again when its file changes; that is done in any case
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_cert_reload: Option<bool>,
    /// Answer for gRPC health beside ext_proc, too; that is done in any case
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub health_checking: Option<bool>,
    /// Serve so long as before after the signal to stop, in place of `drain.grace`
    #[arg(long, value_name = "TIME")]
    pub drain_timeout: Option<Period>,
    /// Serve the admin pages on this port; their address stays what `admin.listen` says
    #[arg(long, value_name = "PORT")]
    pub metrics_port: Option<u16>,
    /// Form of the log: json or console
    #[arg(long, value_name = "FORM", value_parser = encoder)]
    pub zap_encoder: Option<LogFormat>,
    /// How much is logged: 0 to 3 info, 4 debug, from 5 on everything
    #[arg(long = "v", short = 'v', value_name = "LEVEL")]
    pub verbosity: Option<u8>,
}

impl ServeArgs {
    /// What is said over the file.
    pub fn flags(&self) -> Flags {
        Flags {
            pool_name: self.pool_name.clone(),
            pool_namespace: self.pool_namespace.clone(),
            grpc_port: self.grpc_port,
            grpc_health_port: self.grpc_health_port,
            secure_serving: self.secure_serving,
            // As it is seen from where the command was given, and not from the configuration.
            cert_dir: self
                .cert_path
                .as_ref()
                .map(|dir| std::path::absolute(dir).unwrap_or_else(|_| dir.clone())),
            drain_grace: self.drain_timeout,
            metrics_port: self.metrics_port,
            log_format: self.zap_encoder,
            log_level: self.verbosity.map(level),
        }
    }
}

fn encoder(text: &str) -> Result<LogFormat, String> {
    match text {
        "json" => Ok(LogFormat::Json),
        "console" => Ok(LogFormat::Text),
        _ => Err("an encoder is json or console".to_owned()),
    }
}

/// As the charts count: 2 is usual, 3 says more of the same, 4 is for finding mistakes.
fn level(verbosity: u8) -> LogLevel {
    match verbosity {
        0..=3 => LogLevel::Info,
        4 => LogLevel::Debug,
        5.. => LogLevel::Trace,
    }
}

/// The command line with the command that endpoint pickers are not told: where only flags are given, they are those of `serve`.
pub(super) fn with_command(args: Vec<OsString>) -> Vec<OsString> {
    let of_itself = ["-h", "--help", "-V", "--version"];
    let first = args.get(1).map(|first| first.to_string_lossy());
    let is_flag =
        first.is_some_and(|first| first.starts_with('-') && !of_itself.contains(&&*first));
    let command = is_flag.then(|| OsString::from("serve"));
    let mut args = args.into_iter();
    args.next().into_iter().chain(command).chain(args).collect()
}

/// The command line without the flags of the logger that we do not have: whatever begins with `--zap-`, with its value.
pub(super) fn without_logger_flags(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let text = arg.to_string_lossy();
        let foreign = text.starts_with("--zap-")
            && !(text == "--zap-encoder" || text.starts_with("--zap-encoder="));
        if !foreign {
            kept.push(arg);
        } else if !text.contains('=') {
            let _value = args.next_if(|next| !next.to_string_lossy().starts_with('-'));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};

    fn serve(more: &[&str]) -> Result<Flags, clap::Error> {
        let args = ["warmroute", "serve", "--config", "w.yaml"]
            .iter()
            .chain(more)
            .map(OsString::from);
        let Command::Serve(args) = Cli::read(args)?.command else {
            panic!("another command")
        };
        assert_eq!(args.config, Some(PathBuf::from("w.yaml")));
        Ok(args.flags())
    }

    #[test]
    fn an_endpoint_picker_has_flags_and_no_command() {
        let read = |args: &[&str]| Cli::read(["warmroute"].iter().chain(args).map(OsString::from));
        let Command::Serve(args) = read(&["--zap-devel", "--pool-name", "p", "--v", "4"])
            .unwrap()
            .command
        else {
            panic!("another command")
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
    fn the_flags_of_charts_and_of_the_conformance_tests_are_understood() {
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
            drain_grace: Some(Period::seconds(90)),
            log_format: Some(LogFormat::Json),
            log_level: Some(LogLevel::Debug),
        };
        assert_eq!(serve(&given).unwrap(), expected);
    }

    #[test]
    fn verbosity_and_encoder_in_their_spellings() {
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
