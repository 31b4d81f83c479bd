//! `warmroute check`: validates a configuration, and prints a verdict.

use std::io::{Read as _, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use warmroute_server::app;
use warmroute_server::config::{Advice, Config};
use warmroute_server::serve::EXIT_MISCONFIGURED;
use warmroute_settings::{ConfigError, format_count};

use super::admin_client::pretty_json;
use super::style;
use crate::cmd::cli::CheckArgs;

/// Name of the command line in errors.
const COMMAND_LINE: &str = "the command line";
/// Name of standard input in errors. Relative paths in it are relative to the working directory.
const STDIN: &str = "<stdin>";

/// Result of a check.
#[derive(Debug, Serialize)]
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
    let (report, config) = match CheckedSource::read(args) {
        Ok(source) => source.check(args)?,
        Err(error) if args.json => {
            let error = ConfigError::of_file(Path::new(COMMAND_LINE), error.to_string());
            (ConfigCheckReport::invalid(None, vec![error]), None)
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

/// The configuration to check.
struct CheckedSource {
    /// Path of the file, or [`STDIN`]; `None` if there are only flags.
    path: Option<PathBuf>,
    /// Standard input.
    bytes: Option<Vec<u8>>,
}

impl CheckedSource {
    fn read(args: &CheckArgs) -> anyhow::Result<Self> {
        let Some(path) = args.serve.config_file()? else {
            return Ok(Self {
                path: None,
                bytes: None,
            });
        };
        if path != Path::new("-") {
            return Ok(Self {
                path: Some(path.to_owned()),
                bytes: None,
            });
        }
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes)?;
        Ok(Self {
            path: Some(STDIN.into()),
            bytes: Some(bytes),
        })
    }

    /// Returns the report, and the configuration if it is valid.
    fn check(self, args: &CheckArgs) -> anyhow::Result<(ConfigCheckReport, Option<Config>)> {
        let flags = args.serve.flags.clone();
        let read = match (&self.path, &self.bytes) {
            (Some(path), Some(bytes)) => Config::parse_all(path, bytes, &flags),
            (Some(path), None) => Config::load_with(path, &flags),
            (None, _) => Config::of_flags(&flags),
        };
        let config = match read {
            Ok(config) => config,
            Err(errors) => {
                return Ok((
                    ConfigCheckReport::invalid(self.path.as_deref(), errors),
                    None,
                ));
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
                let errors = match (&self.path, &self.bytes) {
                    (Some(path), Some(bytes)) => Config::locate_in(path, bytes, found.problems),
                    (Some(path), None) => Config::locate(path, found.problems),
                    (None, _) => Vec::from_iter(found.problems.into_iter().map(|problem| {
                        ConfigError::of_file(Path::new(COMMAND_LINE), problem.text)
                    })),
                };
                return Ok((
                    ConfigCheckReport::invalid(self.path.as_deref(), errors),
                    None,
                ));
            }
            warnings.extend(found.warnings);
        }
        let is_listed = config.workers.dns.is_empty() && config.workers.kubernetes.is_none();
        let report = ConfigCheckReport {
            file: self.path.as_deref().map(file_name),
            valid: true,
            models: config.models.len(),
            workers: is_listed.then_some(workers.len()),
            errors: Vec::new(),
            warnings,
        };
        Ok((report, Some(config)))
    }
}

/// Returns the name of a file as text, in which invalid UTF-8 is replaced.
fn file_name(path: &Path) -> String {
    path.display().to_string()
}

impl ConfigCheckReport {
    fn invalid(file: Option<&Path>, errors: Vec<ConfigError>) -> Self {
        Self {
            file: file.map(file_name),
            valid: false,
            models: 0,
            workers: None,
            errors,
            warnings: Vec::new(),
        }
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
