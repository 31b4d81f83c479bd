//! `warmroute check`: validates a configuration, and prints a verdict.

use std::io::{Read as _, Write};
use std::path::Path;

use serde::Serialize;
use warmroute_server::app;
use warmroute_server::config::{Advice, COMMAND_LINE, Config};
use warmroute_server::serve::EXIT_MISCONFIGURED;
use warmroute_settings::{ConfigError, format_count};

use super::admin_client::pretty_json;
use super::style;
use crate::cmd::cli::CheckArgs;

/// Name of standard input in errors. Relative paths in it are relative to the working directory.
const STDIN: &str = "<stdin>";

/// Result of a check.
#[derive(Debug, Default, Serialize)]
struct ConfigCheckReport {
    /// Name of the file; `None` if only flags are checked.
    file: Option<String>,
    valid: bool,
    /// Number of configured models.
    models: usize,
    /// Number of listed workers; `None` if a service discovers them.
    workers: Option<usize>,
    errors: Vec<ConfigError>,
    warnings: Vec<Advice>,
}

/// Checks a configuration as `serve` would load it. Returns the exit code.
pub fn run(args: &CheckArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let mut report = ConfigCheckReport::default();
    let config = match ConfigSource::read(args) {
        Ok(source) => report.check(source, args)?,
        Err(error) if args.json => {
            let path = Path::new(COMMAND_LINE);
            report.errors = vec![ConfigError::of_file(path, error.to_string())];
            None
        }
        Err(error) => return Err(error),
    };
    if args.json {
        out.write_all(pretty_json(&serde_json::to_value(&report)?)?.as_bytes())?;
    } else {
        if let Some(config) = config.as_ref().filter(|_| args.print) {
            out.write_all(config.to_yaml()?.as_bytes())?;
        }
        report.write(args.quiet, err)?;
    }
    Ok(if report.valid { 0 } else { EXIT_MISCONFIGURED })
}

/// Text of a configuration.
struct ConfigSource<'a> {
    /// Path of the file, [`STDIN`] or [`COMMAND_LINE`].
    path: &'a Path,
    bytes: Result<Vec<u8>, Vec<ConfigError>>,
}

impl<'a> ConfigSource<'a> {
    fn read(args: &'a CheckArgs) -> anyhow::Result<Self> {
        let (path, bytes) = match args.serve.config_file()? {
            None => (
                Path::new(COMMAND_LINE),
                Ok(args.serve.flags.default_document()),
            ),
            Some(path) if path == Path::new("-") => {
                let mut bytes = Vec::new();
                std::io::stdin().read_to_end(&mut bytes)?;
                (Path::new(STDIN), Ok(bytes))
            }
            Some(path) => (path, Config::read_file(path)),
        };
        Ok(Self { path, bytes })
    }
}

impl ConfigCheckReport {
    /// Fills in the report. Returns the configuration if it is valid.
    fn check(
        &mut self,
        source: ConfigSource<'_>,
        args: &CheckArgs,
    ) -> anyhow::Result<Option<Config>> {
        let ConfigSource { path, bytes } = source;
        let flags = &args.serve.flags;
        self.file = (path != Path::new(COMMAND_LINE)).then(|| path.display().to_string());
        let parsed = bytes.and_then(|bytes| Ok((Config::parse_all(path, &bytes, flags)?, bytes)));
        let (config, bytes) = match parsed {
            Ok(parsed) => parsed,
            Err(errors) => {
                self.errors = errors;
                return Ok(None);
            }
        };
        let workers = app::listed_workers(&config)?;
        let mut warnings = config.advice(&workers);
        if !args.fast {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let found = runtime.block_on(app::try_load(&config));
            if !found.problems.is_empty() {
                self.errors = Config::locate(path, &bytes, found.problems);
                return Ok(None);
            }
            warnings.extend(found.warnings);
        }
        let is_listed = config.workers.dns.is_empty() && config.workers.kubernetes.is_none();
        self.valid = true;
        self.models = config.models.len();
        self.workers = is_listed.then_some(workers.len());
        self.warnings = warnings;
        Ok(Some(config))
    }

    /// Writes errors and warnings, one per line, and the verdict. If `quiet`, writes only errors.
    fn write(&self, quiet: bool, err: &mut impl Write) -> std::io::Result<()> {
        for problem in &self.errors {
            writeln!(err, "{problem}")?;
        }
        if quiet {
            return Ok(());
        }
        let warning = style::label(style::WARNING, "warning");
        for found in &self.warnings {
            writeln!(err, "{warning}: {found}")?;
        }
        if self.valid {
            let models = format_count(self.models, "model");
            let workers = self.workers.map_or_else(
                || "discovered workers".to_owned(),
                |count| format_count(count, "worker"),
            );
            let warnings = format_count(self.warnings.len(), "warning");
            let ok = style::label(style::OK, "ok");
            writeln!(err, "{ok}: {models}, {workers}, {warnings}")
        } else {
            let errors = format_count(self.errors.len(), "error");
            let place = self.file.as_deref().unwrap_or(COMMAND_LINE);
            writeln!(err, "{} in {place}", style::label(style::ERROR, errors))
        }
    }
}
