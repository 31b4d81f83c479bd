//! Routing headers of canaries. Front ends find the worker by them, as for requests of clients.

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use warmroute_core::router::{Mode, RankEndpoint, RouteTarget};
use warmroute_core::worker::{DpRank, Worker, WorkerRank, WorkerRole};

use super::Config;
use crate::ext_proc::config::GatewayConfig;

/// Header that selects a rank of an engine that serves several.
const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Routing headers of canaries.
#[derive(Clone, Debug, PartialEq)]
pub struct CanaryHeaders {
    gateway: GatewayConfig,
    /// Whether the headers name both workers of a pair.
    names_pairs: bool,
}

impl CanaryHeaders {
    /// Returns the headers of a configuration.
    pub fn new(config: &Config) -> Self {
        Self {
            gateway: config.gateway.clone(),
            names_pairs: config.has_dynamo_prefills(),
        }
    }

    /// Returns the headers of a canary for a rank of `worker`. `rank` is `None` if the worker has
    /// only one. The other worker of a pair is the first in `workers` with its model.
    pub fn headers<'w>(
        &self,
        worker: &Worker,
        rank: Option<DpRank>,
        workers: impl IntoIterator<Item = &'w Worker>,
    ) -> HeaderMap {
        let endpoint = |worker: &Worker, rank: Option<DpRank>| RankEndpoint {
            rank: WorkerRank {
                worker: worker.id,
                rank: rank.unwrap_or(DpRank(worker.ranks.start)),
            },
            endpoint: worker.endpoint,
            via: worker.via,
            several_ranks: rank.is_some(),
        };
        let partner_role = match worker.role {
            WorkerRole::Prefill => Some(WorkerRole::Decode),
            WorkerRole::Decode => Some(WorkerRole::Prefill),
            WorkerRole::Aggregated => None,
        };
        let partner = workers
            .into_iter()
            .filter(|other| self.names_pairs && other.model == worker.model)
            .find(|other| Some(other.role) == partner_role)
            .map(|other| endpoint(other, None));
        let own = endpoint(worker, rank);
        let (to, prefill) = match (worker.role, partner) {
            (WorkerRole::Prefill, Some(decode)) => (decode, Some(own)),
            (_, partner) => (own, partner),
        };
        let target = RouteTarget {
            to: Some(to),
            prefill,
            mode: Mode::LoadOnly,
            ..RouteTarget::PASSTHROUGH
        };
        let names = self.gateway.routing_headers();
        let parsed = names.route_headers(&target).filter_map(|(name, value)| {
            let name = HeaderName::try_from(&**name).ok()?;
            Some((name, HeaderValue::try_from(value).ok()?))
        });
        let mut headers: HeaderMap = parsed.collect();
        if to.several_ranks {
            headers.insert(RANK_HEADER, to.rank.rank.0.into());
        }
        headers
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::config::WorkerSource;

    /// Returns the headers of each worker in a fleet of two pairs.
    fn headers(profiles: &[&str], rank: Option<u32>) -> Vec<Vec<(String, String)>> {
        let worker = |id: u64, role: &str| json!({"id": id, "endpoint": format!("10.0.0.{id}:80"), "role": role});
        let text = json!({
            "models": [{"name": "m", "prefill": {"mode": "header"}}],
            "workers": {"list": [
                worker(1, "prefill"), worker(2, "decode"), worker(3, "prefill"), worker(4, "decode"), worker(5, "aggregated"),
            ]},
            "gateway": {"header_profiles": profiles},
        });
        let config = Config::parse(Path::new("/c.yaml"), text.to_string().as_bytes()).unwrap();
        let WorkerSource::Fixed(workers) = config.worker_source() else {
            panic!("the workers are not a fixed list")
        };
        let canary_headers = CanaryHeaders::new(&config);
        let of = |worker| canary_headers.headers(worker, rank.map(DpRank), &workers);
        let text = |headers: HeaderMap| {
            let line = |(name, value): (&HeaderName, &HeaderValue)| {
                (name.to_string(), value.to_str().unwrap().to_owned())
            };
            headers.iter().map(line).collect()
        };
        workers.iter().map(of).map(text).collect()
    }

    fn owned<const N: usize>(lines: [(&str, &str); N]) -> Vec<(String, String)> {
        lines
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec()
    }

    #[test]
    fn canaries_name_both_workers_of_a_pair() {
        let found = headers(&["dynamo"], None);
        let named = |at: usize, name: &str| {
            let line = found[at].iter().find(|(known, _)| known == name)?;
            Some(line.1.as_str())
        };
        let pair = |at| {
            [
                named(at, "x-worker-instance-id"),
                named(at, "x-prefill-instance-id"),
                named(at, "x-dynamo-worker-instance-id"),
                named(at, "x-dynamo-prefill-instance-id"),
            ]
        };
        assert_eq!(pair(0), [Some("2"), Some("1"), Some("2"), Some("1")]);
        assert_eq!(pair(1), [Some("2"), Some("1"), Some("2"), Some("1")]);
        assert_eq!(pair(2), [Some("2"), Some("3"), Some("2"), Some("3")]);
        assert_eq!(pair(3), [Some("4"), Some("1"), Some("4"), Some("1")]);
        assert_eq!(pair(4), [Some("5"), None, Some("5"), None]);
    }

    #[test]
    fn canaries_of_engines_name_no_prefill_worker() {
        for found in headers(&["worker-id", "llm-d"], None) {
            assert!(
                found.iter().all(|(name, _)| !name.contains("prefill")),
                "{found:?}"
            );
        }
        let found = headers(&["worker-id"], Some(0)).pop().unwrap();
        let expected = owned([
            ("x-worker-instance-id", "5"),
            ("x-dp-rank", "0"),
            ("x-data-parallel-rank", "0"),
        ]);
        assert_eq!(found, expected);
    }

    #[test]
    fn dynamo_profile_enforces_remote_prefills() {
        let enforced = |gateway: &str, prefill: &str| {
            let text = format!(
                "{{models: [{{name: m, prefill: {{mode: {prefill}}}}}], workers: {{list: [{{id: 1, endpoint: 10.0.0.1:80}}]}}, gateway: {{header_profiles: [{gateway}]}}}}"
            );
            let config = Config::parse(Path::new("/c.yaml"), text.as_bytes()).unwrap();
            let settings = config.router_settings();
            // Aggregated workers of the model may still compute prompts.
            assert!(settings.prefill_required_models.is_empty());
            settings.disaggregation.enforce
        };
        assert!(enforced("dynamo", "header"));
        assert!(!enforced("worker-id", "header"));
        assert!(!enforced("dynamo", "call"));
    }
}
