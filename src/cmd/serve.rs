//! `warmroute serve`: the router, until a signal.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::app::{self, App, ConfigFile};
use crate::cli::ServeArgs;
use crate::config::Config;
use crate::telemetry;

/// Serves until SIGTERM or SIGINT, drains, and does not wait for that after a second one; the exit code of the process.
pub fn run(args: &ServeArgs, err: &mut impl Write) -> anyhow::Result<u8> {
    let flags = args.flags();
    let asked = Arc::new(Notify::new());
    let (read, file) = match args.config.clone() {
        None => (Config::of_flags(&flags), None),
        Some(path) => {
            // Before it is read and checked: what changes after that is news.
            let seen = std::fs::read(&path).ok().into();
            let read = Config::load_with(&path, &flags);
            let again = path.clone();
            let again = Box::new(move || Config::load_with(&again, &flags));
            (
                read,
                Some(ConfigFile {
                    path,
                    read: again,
                    asked: asked.clone(),
                    seen,
                }),
            )
        }
    };
    let Some(config) = super::usable(read, err)? else {
        return Ok(super::MISCONFIGURED);
    };
    let log = telemetry::start(&config.log);
    telemetry::hide_panics();
    // A list that cannot be read is told of where it is followed.
    for advice in config.advice(&app::listed(&config).unwrap_or_default()) {
        warn!(of = advice.subject, fix = advice.mend, "{}", advice.seen);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let ended = runtime.block_on(async {
        // Before anything else: a signal during start-up must end it cleanly, too, and none to reload may end it.
        let mut ends =
            Ends { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? };
        let _hangups = tokio::spawn(hangups(signal(SignalKind::hangup())?, asked));
        let mut app = tokio::select! {
            app = App::start(config) => match app {
                Ok(app) => app,
                Err(error) => return Ok(failure("cannot start", &error)),
            },
            signal = ends.next() => {
                info!(signal, "stopped before everything was there");
                return Ok(0);
            }
        };
        if let Some(file) = file {
            app.follow(file, log);
        }
        let drain = CancellationToken::new();
        let running = app.run_until(drain.clone().cancelled_owned());
        let signals = async {
            // Outside of the log lines: what they say is not even computed where they are switched off.
            let signal = ends.next().await;
            info!(signal, "shutdown requested");
            drain.cancel();
            let signal = ends.next().await;
            info!(signal, "second signal: not waiting for open exchanges");
        };
        tokio::select! {
            ended = running => Ok(ended.map_or_else(|error| failure("stopped by a failure", &error), |()| 0)),
            () = signals => Ok(0),
        }
    });
    // What still runs on the blocking pool must not keep a process that is over.
    runtime.shutdown_timeout(FAREWELL);
    ended
}

/// Logs the one cause of a failure; the exit code.
fn failure(what: &str, error: &anyhow::Error) -> u8 {
    error!("{what}: {error:#}");
    super::exit_code(error)
}

/// How long work that cannot be stopped may hold up the end.
const FAREWELL: Duration = Duration::from_secs(1);

/// The signals that end the process.
struct Ends {
    terminate: Signal,
    interrupt: Signal,
}

impl Ends {
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Each SIGHUP asks for the configuration to be read again; one during the start is remembered.
async fn hangups(mut hangup: Signal, asked: Arc<Notify>) {
    while hangup.recv().await.is_some() {
        info!("SIGHUP");
        asked.notify_one();
    }
}
