//! Facts about prefill workers.

use serde_json::json;
use tokio::net::TcpStream;
use warmroute_core::worker::{Worker, WorkerRole};
use warmroute_doctor::engine::facts::{BootstrapReachability, EngineReply, WorkerFacts};
use warmroute_engines::engine_client::EngineUrl;
use warmroute_server::prefill::{KvTransferProtocol, PrefillConfig, PrefillMode};

use super::FactCollector;

impl FactCollector<'_> {
    /// Fills in the facts about the KV handoff of a prefill worker.
    pub(super) async fn collect_prefill(&self, engine: &EngineUrl, facts: &mut WorkerFacts) {
        if self.uses_bootstrap(&facts.worker) {
            facts.bootstrap = Some(self.probe_bootstrap(&facts.worker).await);
        }
        facts.kv_handoff = self.probe_kv_handoff(engine, &facts.worker).await;
    }

    /// Returns the prefill configuration of the worker's model.
    fn prefill_config(&self, worker: &Worker) -> Option<&PrefillConfig> {
        self.model_config(&worker.model)?.prefill.as_ref()
    }

    /// Returns whether the worker runs requests only in pairs, by bootstrap.
    pub(super) fn uses_bootstrap(&self, worker: &Worker) -> bool {
        worker.role != WorkerRole::Aggregated
            && self
                .prefill_config(worker)
                .is_some_and(|prefill| prefill.mode == PrefillMode::Mirror)
    }

    /// Connects to the bootstrap address of the worker.
    async fn probe_bootstrap(&self, worker: &Worker) -> BootstrapReachability {
        let (host, port) = worker.bootstrap_address();
        let connecting = TcpStream::connect((host.trim_matches(['[', ']']), port));
        match tokio::time::timeout(self.timeout, connecting).await {
            Ok(Ok(_)) => BootstrapReachability::Listening,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                BootstrapReachability::Refused
            }
            Ok(Err(error)) => BootstrapReachability::Unknown(error.to_string()),
            Err(_) => BootstrapReachability::Unknown("no response".to_owned()),
        }
    }

    /// Sends a prefill request with a KV handoff in vLLM's protocol, if the worker's model uses it.
    async fn probe_kv_handoff(
        &self,
        engine: &EngineUrl,
        worker: &Worker,
    ) -> Option<EngineReply<serde_json::Value>> {
        let prefill = self.prefill_config(worker).filter(|prefill| {
            prefill.mode == PrefillMode::Call && prefill.protocol == KvTransferProtocol::Vllm
        });
        prefill.filter(|_| self.sends_canaries && !worker.draining)?;
        let (text, _) = self.new_prompt(engine, worker).await;
        let mut body: serde_json::Value = serde_json::from_slice(&text).ok()?;
        body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
        let body = body.to_string().into();
        Some(
            self.client
                .post(engine, "v1/completions", body, self.timeout)
                .await,
        )
    }
}
