//! Faults that a real API server does not produce on demand: momentary rejections.

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use warmroute::kubernetes::{self, KubernetesRules};
use warmroute_server::fleet::discovery::kubernetes::KubernetesConfig;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::kubernetes::requests::{OBJECTIVES, put_objective};
use crate::support::api_server::ApiServer;

/// Background task that discovers the optional objects of pools.
struct RuleFollower {
    rules: watch::Receiver<Option<KubernetesRules>>,
    _task: AbortOnDropHandle<()>,
    _dir: TempDir,
}

impl RuleFollower {
    fn start(server: &ApiServer, pool: &Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("config");
        std::fs::write(&kubeconfig, server.kubeconfig().to_string()).unwrap();
        let config = json!({"pools": [pool], "kubeconfig": kubeconfig, "watch_timeout": "1s", "resync_interval": "1h"});
        let config: KubernetesConfig = serde_json::from_value(config).unwrap();
        let (rules_tx, rules) = watch::channel(None);
        let task = tokio::spawn(async move {
            kubernetes::watch_rules(&config, |rules| _ = rules_tx.send_replace(Some(rules)))
                .await
                .unwrap();
        });
        Self {
            rules,
            _task: AbortOnDropHandle::new(task),
            _dir: dir,
        }
    }

    /// Returns the status of both kinds, then the objectives.
    fn current(&self) -> Option<Vec<String>> {
        let rules = self.rules.borrow().clone()?;
        let objects = rules
            .objects
            .iter()
            .map(|watched| format!("{}: {}", watched.kind, watched.state));
        let objectives = rules
            .objectives
            .iter()
            .map(|o| format!("{} {} {}", o.pool, o.name, o.priority));
        Some(objects.chain(objectives).collect())
    }

    async fn wait_for(&self, expected: &[&str]) {
        let is_expected = || self.current().is_some_and(|current| current == expected);
        let found = until(PATIENCE, async || is_expected()).await;
        assert!(found, "{:#?}, not {expected:#?}", self.current());
    }
}

const WATCHED: &str = "InferenceObjective: watched as llm-d.ai/v1alpha2";
const REWRITES_FORBIDDEN: &str = "InferenceModelRewrite: forbidden";

/// A restarted API server responds with 403 until its caches are filled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn momentary_403_does_not_suspend_objectives() {
    let mut server = ApiServer::start().await;
    put_objective(&server, "gold", "p", 5);
    server.forbid(OBJECTIVES, false);
    let follower = RuleFollower::start(&server, &json!({"name": "p"}));
    follower
        .wait_for(&[REWRITES_FORBIDDEN, WATCHED, "p gold 5"])
        .await;
    server.stop().await;
    server.forbid(OBJECTIVES, true);
    server.resume().await;
    let refused = server.refused(OBJECTIVES);
    assert!(until(PATIENCE, async || server.refused(OBJECTIVES) > refused + 1).await);
    server.change(OBJECTIVES, "gold", |object| {
        object["spec"]["priority"] = json!(7)
    });
    server.forbid(OBJECTIVES, false);
    follower
        .wait_for(&[REWRITES_FORBIDDEN, WATCHED, "p gold 7"])
        .await;
}

/// warmroute starts before the caches of the API server are filled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn momentary_403_at_start_is_retried() {
    let server = ApiServer::start().await;
    put_objective(&server, "gold", "p", 5);
    // No object can refer to a pool of labels and ports, so no kind is listed for it.
    let labels = json!({"selector": {"app": "p"}, "ports": [80]});
    RuleFollower::start(&server, &labels).wait_for(&[]).await;
    assert_eq!(server.refused(OBJECTIVES), 0);
    let follower = RuleFollower::start(&server, &json!({"name": "p"}));
    let forbidden = "InferenceObjective: forbidden";
    follower.wait_for(&[REWRITES_FORBIDDEN, forbidden]).await;
    server.forbid(OBJECTIVES, false);
    follower
        .wait_for(&[REWRITES_FORBIDDEN, WATCHED, "p gold 5"])
        .await;
}
