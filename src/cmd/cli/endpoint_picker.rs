//! Command lines of endpoint pickers: without a subcommand, and with flags of the Go logger.

use std::ffi::OsString;

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
    use std::path::PathBuf;

    use warmroute_server::config::{LogFormat, LogLevel, ServeFlags};
    use warmroute_settings::DurationSetting;

    use super::*;
    use crate::cmd::cli::{Cli, CliCommand};

    fn serve(more: &[&str]) -> Result<ServeFlags, clap::Error> {
        let args = ["warmroute", "serve", "--config", "w.yaml"]
            .iter()
            .chain(more)
            .map(OsString::from);
        let CliCommand::Serve(args) = Cli::parse_args(args)?.command else {
            panic!("unexpected command")
        };
        assert_eq!(args.config, Some(PathBuf::from("w.yaml")));
        Ok(args.flags)
    }

    #[test]
    fn flags_without_command_mean_serve() {
        let read =
            |args: &[&str]| Cli::parse_args(["warmroute"].iter().chain(args).map(OsString::from));
        let CliCommand::Serve(args) = read(&["--zap-devel", "--pool-name", "p", "--v", "4"])
            .unwrap()
            .command
        else {
            panic!("unexpected command")
        };
        assert_eq!(
            (
                args.config.as_ref(),
                args.flags.pool_name.as_deref(),
                args.flags.log_level
            ),
            (None, Some("p"), Some(LogLevel::Debug))
        );
        assert!(matches!(
            read(&["-c", "w.yaml"]).unwrap().command,
            CliCommand::Serve(_)
        ));
        assert!(matches!(
            read(&["check", "-c", "w.yaml"]).unwrap().command,
            CliCommand::Check(_)
        ));
        for (args, kind) in [
            (
                &[][..],
                clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
            ),
            (&["--help"], clap::error::ErrorKind::DisplayHelp),
            (&["--version"], clap::error::ErrorKind::DisplayVersion),
        ] {
            assert_eq!(read(args).unwrap_err().kind(), kind, "{args:?}");
        }
        let CliCommand::Serve(args) = read(&["--grpc-port", "9002"]).unwrap().command else {
            panic!("unexpected command")
        };
        assert!(args.config_file().is_err());
    }

    #[test]
    fn chart_and_conformance_flags_are_parsed() {
        assert_eq!(serve(&[]).unwrap(), ServeFlags::default());
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
        let expected = ServeFlags {
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
