//! Health checks of ejected workers. An engine that recovers is used again within seconds, without
//! a client's request as a probe.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use tracing::info;
use warmroute_core::router::Router;
use warmroute_core::worker::WorkerId;
use warmroute_engines::engine_client::EngineError;
use warmroute_runtime::lifecycle::ticks;

use super::background::BackgroundTasks;
use super::poll_config::{PollConfig, PollConfigReceiver};
use super::reload::Reloader;
use crate::dispatch::log_tick_changes;

/// Interval at which overdue requests are detected.
const TICK_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between checks of a worker.
const INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of a check.
const DEADLINE: Duration = Duration::from_secs(2);
/// Maximum number of concurrent checks.
const CONCURRENCY: usize = 64;

/// Starts the health checks.
pub(super) fn start(tasks: &mut BackgroundTasks, reloader: &Reloader) {
    let config_rx = PollConfig::watch(reloader, |_, _| ());
    let router = reloader.router().clone();
    tasks.supervise("health_checks", move || {
        let checks = check_ejected(router.clone(), config_rx.clone());
        let router = router.clone();
        async move {
            tokio::select! {
                ended = checks => ended,
                () = watch_health(&router) => Ok(()),
            }
        }
    });
}

/// Passes the time to the router, which detects overdue requests and slow ranks.
async fn watch_health(router: &Router) {
    let mut ticks = ticks(TICK_INTERVAL);
    loop {
        ticks.tick().await;
        log_tick_changes(router, router.on_tick());
    }
}

async fn check_ejected(
    router: Arc<Router>,
    config_rx: PollConfigReceiver<()>,
) -> anyhow::Result<()> {
    let mut ticks = ticks(INTERVAL);
    loop {
        ticks.tick().await;
        let config = config_rx.borrow().clone();
        let checks = router
            .ejected_workers()
            .into_iter()
            .map(|worker| check(&router, &config, worker));
        stream::iter(checks)
            .buffer_unordered(CONCURRENCY)
            .collect::<()>()
            .await;
    }
}

/// Checks one worker. A response that does not show the health of the engine has no effect, as that
/// of a front end that workers share.
async fn check(router: &Router, config: &PollConfig<()>, id: WorkerId) {
    let Some(worker) = router.fleet().worker(id).cloned() else {
        return;
    };
    if !worker.via.is_direct() {
        return;
    }
    let engine = config.engines.url(worker.endpoint);
    let answer = tokio::time::timeout(DEADLINE, config.client.health(&engine)).await;
    let answer = answer.unwrap_or(Err(EngineError::Timeout));
    if let Some(has_answered) = EngineError::has_answered(&answer) {
        router.record_reachability(id, has_answered);
    }
    let Some(is_healthy) = is_healthy(&answer) else {
        return;
    };
    if router.on_health_check(id, is_healthy) {
        info!(worker = %id, name = worker.display_name(), "health check of ejected worker passed; the next request may probe it");
    }
}

fn is_healthy(answer: &Result<(), EngineError>) -> Option<bool> {
    match answer {
        Ok(()) => Some(true),
        Err(
            EngineError::Unreachable(_)
            | EngineError::Timeout
            | EngineError::Status { status: 500.., .. },
        ) => Some(false),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_unrelated_to_health_are_ignored() {
        let status = |status| {
            Err(EngineError::Status {
                status,
                message: None,
            })
        };
        let cases = [
            (Ok(()), Some(true)),
            (
                Err(EngineError::Unreachable("refused".to_owned())),
                Some(false),
            ),
            (Err(EngineError::Timeout), Some(false)),
            (status(503), Some(false)),
            (status(401), None),
            (Err(EngineError::NotOffered(404)), None),
            (Err(EngineError::Busy), None),
        ];
        for (answer, expected) in cases {
            assert_eq!(is_healthy(&answer), expected, "{answer:?}");
        }
    }
}
