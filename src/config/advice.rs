//! What a configuration may say and surely does not mean: prefills that nobody can do, or that nobody is told of, requests for
//! pools that nobody is of. Nothing of
//! it keeps the process from serving, and the workers may change at any time, so it is told and not refused.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::{Config, ModelConfig};
use crate::discovery::kubernetes::PodsConfig;
use crate::prefill::By;
use crate::settings::Size;
use crate::worker::{Role, Worker};

/// Something that is hardly meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// Of what: a model, a worker.
    pub subject: String,
    /// What is, and what follows from it.
    pub seen: String,
    /// What to write where.
    pub mend: String,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.subject, self.seen, self.mend)
    }
}

impl Config {
    /// What should be looked at again, with these workers.
    pub fn advice(&self, workers: &[Worker]) -> Vec<Advice> {
        let of_models = self.models.iter().flat_map(|model| {
            let roles: Vec<Role> = workers
                .iter()
                .filter(|worker| worker.model == model.name)
                .map(|worker| worker.role)
                .collect();
            pools(model, &roles)
                .into_iter()
                .chain(conditional(self, model))
        });
        let meetings = workers
            .iter()
            .filter_map(|worker| meeting_place(self, worker));
        let values = [
            short_bodies(self),
            long_deadline(self),
            trusted_open_listener(self),
        ]
        .into_iter()
        .flatten();
        let of_pools = confined(self, workers)
            .into_iter()
            .chain(unconfined(self, workers))
            .chain(found_twice(self));
        of_models
            .chain(meetings)
            .chain(of_pools)
            .chain(values)
            .collect()
    }

    fn way(&self, worker: &Worker) -> Option<By> {
        let model = self
            .models
            .iter()
            .find(|model| model.name == worker.model)?;
        way(model)
    }
}

/// A smaller limit is probably a size without its unit.
const SHORT_BODY: Size = Size::kib(64);

/// `message_timeout` of the shipped Envoy files.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

fn short_bodies(config: &Config) -> Option<Advice> {
    let limit = config.limits.body;
    (limit < SHORT_BODY).then(|| Advice {
        subject: "limits.body".to_owned(),
        seen: format!(
            "{} bytes are less than many requests have; longer ones are routed by load only",
            limit.0
        ),
        mend: "write the unit, for example 32MiB".to_owned(),
    })
}

fn long_deadline(config: &Config) -> Option<Advice> {
    let deadline = config.limits.exchange_deadline;
    (deadline.get() >= MESSAGE_TIMEOUT).then(|| Advice {
        subject: "limits.exchange_deadline".to_owned(),
        seen: format!(
            "{deadline} is not less than the message_timeout of the shipped Envoy files (1s), after which Envoy routes \
                       without an answer"
        ),
        mend: "lower it, or raise `message_timeout` of the ext_proc filter above it".to_owned(),
    })
}

/// Clients that connect without Envoy can send headers that Envoy would remove.
fn trusted_open_listener(config: &Config) -> Option<Advice> {
    let open = config
        .listen
        .tcp
        .filter(|listen| config.listen.unprotected && !listen.ip().to_canonical().is_loopback())?;
    config.clients.trusted.then(|| Advice {
        subject: "clients.trusted".to_owned(),
        seen: format!(
            "any client that reaches {open} may pin workers and set priorities, because `listen.unprotected` is true"
        ),
        mend: "set `listen.tls.client_ca`, or allow only Envoy by a network policy".to_owned(),
    })
}

fn way(model: &ModelConfig) -> Option<By> {
    model.prefill.as_ref().map(|prefill| prefill.by)
}

/// Whether there is somebody for each phase, and whether those who are there are told.
fn pools(model: &ModelConfig, roles: &[Role]) -> Option<Advice> {
    let has = |role| roles.contains(&role);
    let (prefill, decode, aggregated) =
        (has(Role::Prefill), has(Role::Decode), has(Role::Aggregated));
    let (seen, mend) = match way(model) {
        _ if roles.is_empty() => return None,
        None if prefill => (
            "its workers with `role: prefill` are named in headers and nothing else: without a sidecar or a front end that \
             reads these nobody prefills there, and they count as busy",
            "write `prefill: {by: call}` (vLLM, TensorRT-LLM) or `prefill: {by: mirror}` (SGLang) for it, or `prefill: {by: \
             header}` where such a one is there",
        ),
        Some(By::Call) if !prefill => (
            "`prefill: {by: call}`, and none of its workers has `role: prefill`: whoever decodes computes every prompt",
            "write `role: prefill` for some of them, or take `prefill` out",
        ),
        Some(By::Call) if !decode && !aggregated => (
            "all of its workers have `role: prefill`: nobody answers",
            "write `role: decode` for some of them",
        ),
        Some(By::Mirror) if !prefill && decode => (
            "`prefill: {by: mirror}`, and none of its workers has `role: prefill`: its decode workers have nobody to meet, and \
             its requests are refused",
            "write `role: prefill` for some of them",
        ),
        Some(By::Mirror) if prefill && !decode => (
            "`prefill: {by: mirror}`, and none of its workers has `role: decode`: its prefill workers have nobody to meet",
            "write `role: decode` for some of them",
        ),
        Some(By::Mirror) if !prefill && !decode => (
            "`prefill: {by: mirror}`, and its workers have no roles: none of them meets another",
            "write `role: prefill` and `role: decode` for them, or take `prefill` out",
        ),
        _ => return None,
    };
    Some(Advice {
        subject: format!("model {}", model.name),
        seen: seen.to_owned(),
        mend: mend.to_owned(),
    })
}

fn conditional(config: &Config, model: &ModelConfig) -> Option<Advice> {
    let ignored = config.disaggregation.conditional.is_some() && way(model) == Some(By::Mirror);
    ignored.then(|| Advice {
        subject: format!("model {}", model.name),
        seen: "`disaggregation.conditional` is not for models with `prefill: {by: mirror}`: their decode workers refuse what \
               they are to prefill themselves, so every prompt goes to a prefill worker"
            .to_owned(),
        mend: "take it out, unless it is meant for other models".to_owned(),
    })
}

/// A place to be met at, of somebody whom nobody meets.
fn meeting_place(config: &Config, worker: &Worker) -> Option<Advice> {
    worker.bootstrap.as_ref()?;
    let why = match (worker.role, config.way(worker)) {
        (Role::Prefill, Some(By::Mirror)) => return None,
        (Role::Prefill, _) => format!(
            "the model {} has no `prefill: {{by: mirror}}`",
            worker.model
        ),
        (role, _) => format!("it has `role: {role}`, and prefill workers are who is met"),
    };
    Some(Advice {
        subject: format!("worker {}", worker.id),
        seen: format!("`bootstrap` is without effect: {why}"),
        mend: "take it out, or write what is missing".to_owned(),
    })
}

/// Rules for pools that nobody is of: their requests are refused.
fn confined(config: &Config, workers: &[Worker]) -> Vec<Advice> {
    // Who is found by a file may come later.
    let mut pools: Vec<&str> = config.confine.pools().collect();
    pools.sort_unstable();
    pools.dedup();
    let nobody = pools
        .into_iter()
        .filter(|pool| !workers.is_empty() && !workers.iter().any(|worker| worker.is_of(pool)));
    let advice = |pool: &str| Advice {
        subject: "confine".to_owned(),
        seen: format!("no worker is of the pool `{pool}`, so requests for it are refused"),
        mend: match &config.kubernetes {
            Some(kubernetes) => {
                let titles: Vec<String> = kubernetes
                    .pools
                    .iter()
                    .map(|pool| format!("`{}`", pool.title()))
                    .collect();
                format!("the pools of `kubernetes` are {}", titles.join(", "))
            }
            None => format!("write the taint `pool={pool}` for its workers"),
        },
    };
    nobody.map(advice).collect()
}

/// Several pools, and requests that nothing confines to one of them. Only Envoy's configuration shows whether it sends the dynamic
/// metadata `pool`.
fn unconfined(config: &Config, workers: &[Worker]) -> Option<Advice> {
    let of_kubernetes = config
        .kubernetes
        .iter()
        .flat_map(|kubernetes| kubernetes.pools.iter().map(PodsConfig::title));
    let of_workers = workers
        .iter()
        .flat_map(|worker| worker.pools().map(str::to_owned));
    let pools: BTreeSet<String> = of_kubernetes.chain(of_workers).collect();
    let confine = &config.confine;
    let unnamed: Vec<String> = pools
        .iter()
        .filter(|pool| confine.pools().all(|named| named != *pool))
        .map(|pool| format!("`{pool}`"))
        .collect();
    // A header may name every pool, and a rule for all requests leaves none unconfined.
    if pools.len() < 2 || confine.header.is_some() || confine.has_default() || unnamed.is_empty() {
        return None;
    }
    let unnamed = unnamed.join(", ");
    let seen = if confine.is_empty() {
        format!(
            "the workers belong to the pools {unnamed}, and `confine` is empty: a request may be routed to a worker of another pool than \
             that of its route"
        )
    } else {
        format!(
            "`confine` does not name the pools {unnamed}: requests for them are not confined, and may be routed to a worker of any pool"
        )
    };
    Some(Advice {
        subject: "confine".to_owned(),
        seen,
        mend: "give each pool a Service in front of warmroute and write `confine: {authority: {<service>.<namespace>: <pool>}}`, or \
               `header` or `rules` of `confine`. Where Envoy sends the dynamic metadata `pool`, write a rule for requests without it"
            .to_owned(),
    })
}

/// Pods that are found by several entries: each worker can be there once only, so the others' settings are for nobody.
fn found_twice(config: &Config) -> Vec<Advice> {
    let pools = config
        .kubernetes
        .as_ref()
        .map(|kubernetes| &kubernetes.pools[..])
        .unwrap_or_default();
    let again = pools
        .iter()
        .enumerate()
        .filter(|(at, pool)| pools[..*at].iter().any(|other| other.finds_all_of(pool)));
    let advice = |(_, pool): (usize, &PodsConfig)| Advice {
        subject: "kubernetes".to_owned(),
        seen: format!(
            "the pods of `{}` are found by an earlier entry already, so this one finds nobody",
            pool.title()
        ),
        mend: "leave one out".to_owned(),
    };
    again.map(advice).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::config::WorkerSource;

    fn advice(model: &Value, workers: &[Value], more: &Value) -> Vec<String> {
        let numbered = workers.iter().zip(1..).map(|(worker, id)| {
            let mut worker = worker.clone();
            worker["id"] = json!(id);
            worker["endpoint"] = json!(format!("10.0.0.{id}:8000"));
            worker
        });
        let mut config =
            json!({"models": [{"name": "m"}], "workers": numbered.collect::<Vec<_>>()});
        config["models"][0]
            .as_object_mut()
            .unwrap()
            .extend(model.as_object().unwrap().clone());
        config
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let config = Config::parse(Path::new("/c.yaml"), config.to_string().as_bytes()).unwrap();
        let WorkerSource::Fixed(workers) = config.worker_source() else {
            panic!("another source")
        };
        config
            .advice(&workers)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn pools_that_cannot_do_what_is_asked_of_them_are_told() {
        let of = |role: &str| json!({"role": role});
        let by = |by: &str| json!({"prefill": {"by": by}});
        let (p, d, a) = (of("prefill"), of("decode"), of("aggregated"));
        let cases: [(Value, Vec<Value>, &[&str]); 16] = [
            (json!({}), vec![a.clone()], &[]),
            (
                json!({}),
                vec![p.clone(), d.clone()],
                &["named in headers and nothing else"],
            ),
            (json!({}), vec![d.clone(), a.clone()], &[]),
            (by("header"), vec![p.clone(), d.clone()], &[]),
            (by("call"), vec![p.clone(), d.clone()], &[]),
            (by("call"), vec![p.clone(), a.clone()], &[]),
            (
                by("call"),
                vec![d.clone()],
                &["whoever decodes computes every prompt"],
            ),
            (
                by("call"),
                vec![a.clone(), a.clone()],
                &["whoever decodes computes every prompt"],
            ),
            (by("call"), vec![p.clone()], &["nobody answers"]),
            (by("mirror"), vec![p.clone(), d.clone()], &[]),
            (
                by("mirror"),
                vec![d.clone(), a.clone()],
                &["its requests are refused"],
            ),
            (
                by("mirror"),
                vec![p.clone(), a.clone()],
                &["have nobody to meet"],
            ),
            (by("mirror"), vec![a.clone()], &["have no roles"]),
            (
                by("mirror"),
                vec![
                    json!({"role": "prefill", "bootstrap": {"port": 9000}}),
                    json!({"role": "decode", "bootstrap": {}}),
                ],
                &["worker 2: `bootstrap` is without effect: it has `role: decode`"],
            ),
            (
                by("call"),
                vec![json!({"role": "prefill", "bootstrap": {}}), d.clone()],
                &[
                    "worker 1: `bootstrap` is without effect: the model m has no `prefill: {by: mirror}`",
                ],
            ),
            (
                json!({}),
                vec![json!({"bootstrap": {}})],
                &["`role: aggregated`"],
            ),
        ];
        for (model, workers, expected) in cases {
            let told = advice(&model, &workers, &json!({}));
            assert_eq!(told.len(), expected.len(), "{model} {workers:?}: {told:?}");
            for (told, words) in told.iter().zip(expected) {
                assert!(told.contains(words), "{told}");
            }
        }
    }

    #[test]
    fn pools_that_nobody_is_of_and_pods_that_are_found_twice_are_told() {
        let confine =
            json!({"confine": {"rules": [{"pool": "p"}, {"pool": "q", "paths": ["/q"]}]}});
        let worker = json!({"taints": ["pool=p"]});
        let told = advice(&json!({}), std::slice::from_ref(&worker), &confine);
        assert!(
            told.len() == 1 && told[0].contains("`q`") && told[0].contains("`pool=q`"),
            "{told:?}"
        );
        assert_eq!(
            advice(
                &json!({}),
                &[worker, json!({"taints": ["pool=q"]})],
                &confine
            ),
            Vec::<String>::new()
        );
        let confine = json!({"confine": {"authority": {"warmroute.a": "p", "warmroute.b": "q"}}});
        let told = advice(&json!({}), &[json!({"taints": ["pool=p"]})], &confine);
        assert!(told.len() == 1 && told[0].contains("`q`"), "{told:?}");
        let confine =
            json!({"confine": {"rules": [{"pool": "p"}, {"pool": "q", "paths": ["/q"]}]}});
        let pools = |pools: Value| -> Vec<String> {
            let mut config = json!({"models": [{"name": "m"}], "kubernetes": {"pools": pools}});
            config
                .as_object_mut()
                .unwrap()
                .extend(confine.as_object().unwrap().clone());
            let config =
                Config::parse(Path::new("/c.yaml"), config.to_string().as_bytes()).unwrap();
            config
                .advice(&config.typical_workers())
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        let two = json!([{"name": "p"}, {"name": "q"}, {"name": "p", "namespace": "n"}]);
        assert_eq!(pools(two), Vec::<String>::new());
        let told = pools(
            json!([{"name": "p", "namespace": "n"}, {"name": "q"}, {"name": "p", "namespace": "n"}]),
        );
        assert!(
            told.len() == 2
                && told[0].contains("are `n/p`, `q`, `n/p`")
                && told[1].contains("found by"),
            "{told:?}"
        );
        let same = |ports: [u16; 2]| {
            let of = |port: u16| json!({"selector": {"app": "p"}, "ports": [port]});
            let told = pools(json!([{"name": "p"}, {"name": "q"}, of(ports[0]), of(ports[1])]));
            told.len()
        };
        assert_eq!([same([1, 2]), same([1, 1])], [0, 1]);
    }

    #[test]
    fn several_pools_without_confinement_cause_a_warning() {
        let workers = [json!({"taints": ["pool=p"]}), json!({"taints": ["pool=q"]})];
        let warnings = advice(&json!({}), &workers, &json!({}));
        assert!(
            warnings.len() == 1 && warnings[0].contains("`p`, `q`"),
            "{warnings:?}"
        );
        assert_eq!(
            advice(&json!({}), &workers[..1], &json!({})),
            Vec::<String>::new()
        );
        for confine in [
            json!({"header": "x-pool"}),
            json!({"rules": [{"pool": "p"}]}),
            json!({"rules": [{"pool": "p", "paths": ["/p"]}], "authority": {"warmroute.b": "q"}}),
            json!({"authority": {"warmroute.a": "p", "warmroute.b": "q"}}),
        ] {
            assert_eq!(
                advice(&json!({}), &workers, &json!({"confine": confine})),
                Vec::<String>::new(),
                "{confine}"
            );
        }
        for confine in [
            json!({"rules": [{"pool": "p", "paths": ["/p"]}]}),
            json!({"authority": {"warmroute.a": "p"}}),
        ] {
            let warnings = advice(&json!({}), &workers, &json!({"confine": confine}));
            assert!(
                warnings.len() == 1 && warnings[0].contains("does not name the pools `q`"),
                "{warnings:?}"
            );
        }
    }

    #[test]
    fn suspicious_values_cause_warnings() {
        let open = json!({"tcp": "0.0.0.0:9002", "unprotected": true});
        let cases = [
            (json!({}), None),
            (
                json!({"limits": {"body": 32}}),
                Some("limits.body: 32 bytes"),
            ),
            (json!({"limits": {"body": "64KiB"}}), None),
            (json!({"limits": {"exchange_deadline": "999ms"}}), None),
            (
                json!({"limits": {"exchange_deadline": "5s"}}),
                Some("limits.exchange_deadline: 5s is not less"),
            ),
            (json!({"clients": {"trusted": true}}), None),
            (json!({"listen": open}), None),
            (
                json!({"listen": open, "clients": {"trusted": true}}),
                Some("clients.trusted: any client that reaches 0.0.0.0:9002"),
            ),
        ];
        for (more, expected) in cases {
            let found = advice(&json!({}), &[json!({})], &more);
            assert_eq!(
                found.len(),
                usize::from(expected.is_some()),
                "{more}: {found:?}"
            );
            assert!(
                expected.is_none_or(|text| found[0].starts_with(text)),
                "{found:?}"
            );
        }
    }

    #[test]
    fn conditions_that_are_not_asked_are_told() {
        let more = json!({"disaggregation": {"conditional": {}}});
        let pools = [json!({"role": "prefill"}), json!({"role": "decode"})];
        assert_eq!(
            advice(&json!({"prefill": {"by": "call"}}), &pools, &more),
            Vec::<String>::new()
        );
        let told = advice(&json!({"prefill": {"by": "mirror"}}), &pools, &more);
        assert!(
            told.len() == 1 && told[0].contains("`disaggregation.conditional` is not for models"),
            "{told:?}"
        );
    }
}
