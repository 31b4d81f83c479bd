//! What one configuration makes of exchanges with Envoy: the request path and the rules it follows, to be put in place of
//! another's as a whole.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;

use crate::audit::Audit;
use crate::config::{Config, FirstToken, ModelConfig};
use crate::engine_client::config::EnginesConfig;
use crate::entrance::Entrance;
use crate::ext_proc::carrying::{Prefills, Way};
use crate::ext_proc::config::AssumedBodies;
use crate::ext_proc::exchange::{Answers, Options};
use crate::ext_proc::message::{BodyMode, Modes};
use crate::ext_proc::pipeline::{Pipeline, Policy};
use crate::ext_proc::service::{Kept, Live, Service};
use crate::ext_proc::wire::ExtProc;
use crate::intake::Intake;
use crate::metrics::Metrics;
use crate::openai::paths::Paths;
use crate::prefill::{Aborts, By, Call, Caller, Mirror, PrefillConfig, Protocol};
use crate::worker::ModelName;

/// Makes ext_proc services out of configurations. What has to outlive a reload goes from one to the next.
pub(super) struct Gateway {
    entrance: Arc<Entrance>,
    kept: Arc<Kept>,
    /// What goes on although no exchange is open for it.
    under_way: TaskTracker,
    /// Those of the configuration in use.
    callers: Mutex<Callers>,
}

/// The ways to workers of one configuration.
#[derive(Default)]
pub(super) struct Callers {
    /// By model: each that has prefills done has a limit of its own.
    prefills: HashMap<ModelName, Caller>,
    aborts: Option<Arc<Aborts>>,
}

impl Gateway {
    pub(super) fn new(
        entrance: Arc<Entrance>,
        kept: Arc<Kept>,
        under_way: TaskTracker,
    ) -> Arc<Self> {
        Arc::new(Self {
            entrance,
            kept,
            under_way,
            callers: Mutex::default(),
        })
    }

    /// The ext_proc service of one configuration, with its ways to workers: those in use where nothing changes for them, so
    /// that connections and limits go on.
    pub(super) fn prepare(
        &self,
        config: &Config,
        intake: Arc<Intake>,
    ) -> anyhow::Result<(ExtProc, Callers)> {
        let callers = self
            .callers
            .lock()
            .renewed(config, self.kept.metrics(), &self.under_way)?;
        let (entrance, metrics) = (self.entrance.clone(), self.kept.metrics().clone());
        let live = Live {
            pipeline: Pipeline::new(
                intake,
                entrance,
                metrics,
                policy(config),
                callers.prefills(config, self.kept.audit()),
            ),
            options: Arc::new(options(config)),
            upload: config.limits.upload.get(),
            held: config.limits.held_bodies.bytes(),
        };
        // tonic's own limit of 4 MiB would refuse bodies that the configuration allows, and with failure_mode_allow the
        // request would then silently go to a random worker.
        let service = Service::new(live, self.kept.clone());
        Ok((ExtProc::new(service, super::most_bytes(config)), callers))
    }

    /// They are in use now.
    pub(super) fn keep(&self, callers: Callers) {
        *self.callers.lock() = callers;
    }
}

impl Callers {
    fn renewed(
        &self,
        config: &Config,
        metrics: &Arc<Metrics>,
        under_way: &TaskTracker,
    ) -> anyhow::Result<Self> {
        let mut next = Self::default();
        for model in &config.models {
            let Some(prefill) = model
                .prefill
                .as_ref()
                .filter(|prefill| prefill.by != By::Header)
            else {
                continue;
            };
            let (engines, deadline) = (
                engines_for(prefill, &config.engines),
                prefill.deadline.get(),
            );
            let caller = match self.prefills.get(&model.name) {
                Some(caller) => caller.renewed(engines, deadline),
                None => Caller::new(engines, deadline, metrics.clone())
                    .map(|new| new.tracked(under_way.clone())),
            };
            let caller = caller.with_context(|| format!("the prefills of {}", model.name))?;
            // One name for two prompts, or one room, is another matter than a prompt that is computed twice.
            let repeats = prefill.by == By::Call && prefill.protocol == Protocol::Vllm;
            next.prefills
                .insert(model.name.clone(), caller.repeating(repeats));
            if prefill.by == By::Mirror && next.aborts.is_none() {
                next.aborts = Some(match &self.aborts {
                    Some(aborts) => aborts.renewed(&config.engines)?,
                    None => Aborts::tracked(&config.engines, metrics.clone(), under_way.clone())?,
                });
            }
        }
        Ok(next)
    }

    /// How prefills are carried out.
    fn prefills(&self, config: &Config, audit: &Arc<Audit>) -> Prefills {
        let way = |model: &ModelConfig| {
            let (caller, prefill) = (
                self.prefills.get(&model.name)?.clone(),
                model.prefill.as_ref()?,
            );
            let way = match prefill.by {
                By::Header => return None,
                By::Call => Way::Call(Arc::new(Call {
                    caller,
                    protocol: prefill.protocol,
                    tries: prefill.tries,
                    audit: audit.clone(),
                })),
                By::Mirror => Way::Mirror(Arc::new(Mirror {
                    cluster: prefill.cluster.as_str().into(),
                    deadline: prefill.deadline.get(),
                    aborts: self.aborts.clone()?,
                    caller,
                    audit: audit.clone(),
                })),
            };
            Some((model.name.clone(), way))
        };
        Prefills {
            ways: config.models.iter().filter_map(way).collect(),
            contract: config.gateway.contract(),
            trusting: config.clients.trusted,
        }
    }
}

fn engines_for(prefill: &PrefillConfig, engines: &EnginesConfig) -> EnginesConfig {
    let in_flight = if prefill.by == By::Call {
        prefill.in_flight
    } else {
        engines.in_flight
    };
    EnginesConfig {
        in_flight,
        ..engines.clone()
    }
}

fn policy(config: &Config) -> Policy {
    let with_headers = config
        .models
        .iter()
        .filter(|model| model.first_token == FirstToken::Headers);
    let failure = config
        .models
        .iter()
        .filter_map(|model| Some((model.name.clone(), model.failure_mode?)));
    Policy {
        failure: config.failure,
        failure_of: failure.collect(),
        first_token_with_headers: with_headers.map(|model| model.name.clone()).collect(),
        why: config.response.why_header,
        conformance: config.gateway.conformance,
        says_why_dropped: config.gateway.contract().says_why_dropped(),
        says_mode: config.response.mode_header,
    }
}

fn options(config: &Config) -> Options {
    let assumed = match config.gateway.assume {
        AssumedBodies::Buffered => Modes::default(),
        AssumedBodies::FullDuplex => Modes {
            request: BodyMode::FullDuplex,
            response: BodyMode::FullDuplex,
        },
    };
    Options {
        paths: Arc::new(Paths::new(&config.paths)),
        body_limit: config.limits.body.bytes(),
        contract: config.gateway.contract(),
        clear_route_cache: config.gateway.clear_route_cache,
        assumed,
        observe: config.observe,
        output_blocks: config.load.output_blocks,
        conformance: config.gateway.conformance,
        answers: Answers {
            mode: config.response.mode_header,
            worker: config.response.worker_header,
            prediction: config.response.prediction_header,
            why: config.response.why_header,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::Router;
    use axum::extract::connect_info::{ConnectInfo, IntoMakeServiceWithConnectInfo};
    use axum::routing::post;
    use tokio::net::TcpListener;

    use super::*;
    use crate::prefill::Asked;
    use crate::worker::Endpoint;

    fn config(more: &str) -> Config {
        let text = format!(
            "listen: {{tcp: '127.0.0.1:0'}}\nworkers: [{{id: 1, endpoint: '127.0.0.1:1', model: c}}, {{id: 2, endpoint: '127.0.0.1:2', model: m}}]\nmodels:\n- {{name: c, prefill: {{by: call, in_flight: 7}}}}\n\
             - {{name: m, prefill: {{by: mirror}}}}\n{more}\n"
        );
        Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes()).unwrap()
    }

    #[tokio::test]
    async fn connections_to_workers_outlive_a_reload_of_other_settings() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = Endpoint(listener.local_addr().unwrap());
        let caller = async |ConnectInfo(from): ConnectInfo<SocketAddr>| from.to_string();
        let routes: IntoMakeServiceWithConnectInfo<Router, SocketAddr> = Router::new()
            .fallback(post(caller))
            .into_make_service_with_connect_info();
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let (metrics, under_way) = (Arc::new(Metrics::new()), TaskTracker::new());
        let next =
            |before: &Callers, more| before.renewed(&config(more), &metrics, &under_way).unwrap();
        let first = next(&Callers::default(), "");
        let same = next(&first, "load: {output_blocks: true}");
        let other = next(&first, "engines: {answer: 1MiB}");
        let mut connections = HashMap::<String, Vec<String>>::new();
        for callers in [&first, &same, &other] {
            for model in ["c", "m"] {
                let asked = Asked {
                    worker,
                    path: "/v1/completions".to_owned(),
                    headers: reqwest::header::HeaderMap::new(),
                    question: crate::prefill::Question::alone("{}".into()),
                };
                let caller = &callers.prefills[&ModelName::from(model)];
                let answer = caller.prefill(asked, (), |(), _, _| {}).await.1.unwrap();
                connections
                    .entry(model.to_owned())
                    .or_default()
                    .push(String::from_utf8(answer.body().to_vec()).unwrap());
            }
        }
        for (model, seen) in connections {
            assert!(
                seen[0] == seen[1] && seen[1] != seen[2],
                "{model}: {seen:?}"
            );
        }
        let aborts = |callers: &Callers| Arc::as_ptr(callers.aborts.as_ref().unwrap());
        assert!(aborts(&first) == aborts(&same) && aborts(&first) != aborts(&other));
    }
}
