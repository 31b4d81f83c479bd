//! `warmroute serve`: runs the router until a signal.

mod args;

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};
use warmroute_runtime::causes::{describe_failure, is_resource_exhausted};
use warmroute_runtime::descriptors;
use warmroute_settings::{ConfigError, MAX_SETTINGS_FILE, format_count, read_regular_file};
use warmroute_tokens::prompt::LoadError;

use crate::app::telemetry::{self, LogControl};
use crate::app::{self, App, ConfigFile, ExternalDiscovery, ProcessOrigin};
use crate::config::Config;
use crate::version::BuildVersion;

pub use args::{DEFAULT_CONFIG_FILE, ServeArgs, ServeSourceError};

/// Exit code for an invalid configuration.
pub const EXIT_MISCONFIGURED: u8 = 2;

/// Serves until SIGTERM or SIGINT, then drains. A second signal stops the process immediately.
/// Returns the exit code.
pub fn run(
    args: &ServeArgs,
    version: &BuildVersion,
    discovery: Arc<dyn ExternalDiscovery>,
    err: &mut dyn Write,
) -> anyhow::Result<u8> {
    let path = args.config_file()?;
    let reload = Arc::new(Notify::new());
    let (read, file) = read_config(path, args, &reload);
    let Some(config) = config_or_report(read, err)? else {
        return Ok(EXIT_MISCONFIGURED);
    };
    let log = Arc::new(telemetry::init(&config.process.log));
    telemetry::install_panic_hook();
    info!(
        version = version.text,
        config = path.map(Path::display).map(tracing::field::display),
        pid = std::process::id(),
        "starting warmroute"
    );
    telemetry::log_invalid_directives();
    // An unreadable workers file is ignored here: the task that watches the file reports it.
    for advice in config.advice(&app::listed_workers(&config).unwrap_or_default()) {
        warn!(of = advice.subject, fix = advice.fix, "{}", advice.finding);
    }
    descriptors::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let inputs = ServeInputs {
        config,
        file,
        discovery,
        origin: ProcessOrigin {
            version: *version,
            config_file: path
                .map(|file| std::path::absolute(file).unwrap_or_else(|_| file.to_owned())),
        },
        log,
        reload,
    };
    let ended = runtime.block_on(serve(inputs));
    // Work on the blocking pool must not delay the exit further.
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    ended
}

/// Reads the configuration of the process. Also returns the file to follow, or `None` if the
/// configuration consists of flags only.
fn read_config(
    path: Option<&Path>,
    args: &ServeArgs,
    reload: &Arc<Notify>,
) -> (Result<Config, Vec<ConfigError>>, Option<ConfigFile>) {
    let Some(path) = path.map(Path::to_owned) else {
        return (Config::of_flags(&args.flags), None);
    };
    // Read before the configuration is parsed, so that a later change is detected.
    let last_bytes = read_regular_file(&path, MAX_SETTINGS_FILE).ok().into();
    let config = Config::load_with(&path, &args.flags);
    let file = ConfigFile {
        path,
        flags: args.flags.clone(),
        reload_requested: reload.clone(),
        last_bytes,
    };
    (config, Some(file))
}

/// Inputs of the running process.
struct ServeInputs {
    config: Config,
    file: Option<ConfigFile>,
    discovery: Arc<dyn ExternalDiscovery>,
    origin: ProcessOrigin,
    log: Arc<LogControl>,
    reload: Arc<Notify>,
}

/// Runs the process until a signal, or until it fails. Returns the exit code.
async fn serve(inputs: ServeInputs) -> anyhow::Result<u8> {
    let ServeInputs {
        config,
        file,
        discovery,
        origin,
        log,
        reload,
    } = inputs;
    // Installed first: a signal during startup must stop the process cleanly, and SIGHUP must not
    // end it.
    let mut signals = TerminationSignals {
        terminate: signal(SignalKind::terminate())?,
        interrupt: signal(SignalKind::interrupt())?,
    };
    let _hangups = tokio::spawn(forward_hangups(signal(SignalKind::hangup())?, reload));
    let reported = log.clone();
    let _omitted = tokio::spawn(async move { reported.report_omitted_lines().await });
    let mut app = tokio::select! {
        app = Box::pin(App::start(config, discovery, origin)) => match app {
            Ok(app) => app,
            Err(error) => return Ok(log_failure("cannot start", &error)),
        },
        signal = signals.recv() => {
            info!(signal, "stopped during startup");
            return Ok(0);
        }
    };
    if let Some(file) = file {
        app.follow_config_file(file, log);
    }
    let drain = CancellationToken::new();
    let running = app.run_until(drain.clone().cancelled_owned());
    let on_signals = async {
        // Received outside the log macros, which do not evaluate their arguments if the level is
        // disabled.
        let signal = signals.recv().await;
        info!(signal, "shutdown requested");
        drain.cancel();
        let signal = signals.recv().await;
        info!(
            signal,
            "second signal received; exiting without waiting for open exchanges"
        );
    };
    tokio::select! {
        ended = running => {
            Ok(ended.map_or_else(|error| log_failure("stopped because of an error", &error), |()| 0))
        }
        () = on_signals => Ok(0),
    }
}

/// Logs the cause of a failure and returns the exit code.
fn log_failure(phase: &str, error: &anyhow::Error) -> u8 {
    error!("{phase}: {}", describe_failure(error));
    exit_code(error)
}

/// Time that blocking work may delay the exit.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Signals that stop the process.
struct TerminationSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl TerminationSignals {
    async fn recv(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Requests a configuration reload for each SIGHUP. A request during startup takes effect when the
/// reloader runs. The reloader logs the request, because it merges signals.
async fn forward_hangups(mut hangup: Signal, reload: Arc<Notify>) {
    while hangup.recv().await.is_some() {
        debug!("SIGHUP received");
        reload.notify_one();
    }
}

/// Returns the configuration, or writes its errors.
pub fn config_or_report(
    read: Result<Config, Vec<ConfigError>>,
    err: &mut dyn Write,
) -> io::Result<Option<Config>> {
    match read {
        Ok(config) => Ok(Some(config)),
        Err(errors) => write_errors(&errors, err).map(|()| None),
    }
}

/// Writes one line per error, and their number if there are several.
pub fn write_errors(errors: &[ConfigError], err: &mut dyn Write) -> io::Result<()> {
    for error in errors {
        writeln!(err, "{error}")?;
    }
    match errors {
        [first, _, ..] => {
            let count = format_count(errors.len(), "error");
            writeln!(err, "{count} in {}", first.path.display())
        }
        _ => Ok(()),
    }
}

/// Returns the exit code of an error: [`EXIT_MISCONFIGURED`] if a configured file cannot be used or
/// none is named, else 1. A file that cannot be read for lack of descriptors or memory is not
/// misconfigured.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let is_misconfigured = (error.is::<LoadError>() && !is_resource_exhausted(error.as_ref()))
        || error.is::<ServeSourceError>();
    if is_misconfigured {
        EXIT_MISCONFIGURED
    } else {
        1
    }
}
