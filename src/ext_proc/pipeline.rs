//! From a request as Envoy shows it to what Envoy is told: read it, let it in, count it. Every failure on the way is one
//! step down the ladder, counted; an error for the client only where the operator or the request itself wants one.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{Level, debug, enabled};

use super::carrying::{Carriage, Plan, Prefills, Remote};
use super::config::{FailureConfig, FailureMode};
use super::exchange::{Directions, Edit, Inbound, Renamed};
use super::headers::{self, RequestHead};
use super::mutation::Immediate;
use super::reject::{self, Refused};
use crate::entrance::{Admitted, Entrance, Refusal};
use crate::intake::confine::PoolAuthorities;
use crate::intake::{Body, Intake, Taken};
use crate::metrics::{Metrics, ModelLabel, ModelRoleLabels, ReasonLabel, RequestLabels};
use crate::prefill::Called;
use crate::router::{Prompt, Reason, Route, RouteError, Router, Steer};
use crate::schedule::Subset;
use crate::worker::{ModelName, Role};

/// What became of one request.
pub enum Routed {
    /// Envoy forwards it.
    Steered {
        /// What Envoy is told.
        directions: Box<Directions>,
        /// What the request holds, if it was let in.
        admitted: Option<Box<Admitted>>,
        /// What is to be known of its prefill later.
        remote: Option<Remote>,
    },
    /// The client gets this.
    Answered(Immediate),
}

/// What the operator wants of requests and their answers.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// What becomes of requests that cannot be routed, or not be read.
    pub failure: FailureConfig,
    /// Models for which it is something else.
    pub failure_of: HashMap<ModelName, FailureMode>,
    /// Models whose engines send an answer's headers together with its first token.
    pub first_token_with_headers: HashSet<ModelName>,
    /// Whether answers say why; making the line costs a microsecond.
    pub why: bool,
    /// Whether conformance tests may name the endpoints to choose from.
    pub conformance: bool,
    /// Whether refusals say why in llm-d's header.
    pub says_why_dropped: bool,
    /// Whether own answers name the step of the ladder.
    pub says_mode: bool,
}

/// The request path between Envoy's messages and the router.
pub struct Pipeline {
    intake: Arc<Intake>,
    entrance: Arc<Entrance>,
    metrics: Arc<Metrics>,
    policy: Policy,
    prefills: Prefills,
}

impl Pipeline {
    /// A pipeline to a router.
    pub fn new(
        intake: Arc<Intake>,
        entrance: Arc<Entrance>,
        metrics: Arc<Metrics>,
        policy: Policy,
        prefills: Prefills,
    ) -> Arc<Self> {
        Arc::new(Self {
            intake,
            entrance,
            metrics,
            policy,
            prefills,
        })
    }

    /// The way to the router.
    pub(super) fn entrance(&self) -> &Entrance {
        &self.entrance
    }

    /// How prefills are carried out.
    pub(super) fn prefills(&self) -> &Prefills {
        &self.prefills
    }

    /// The pools by the authority of a call.
    pub(super) fn pool_authorities(&self) -> &PoolAuthorities {
        self.intake.pool_authorities()
    }

    /// The router behind it.
    pub fn router(&self) -> &Arc<Router> {
        self.entrance.router()
    }

    /// Finds the workers for one request. Where it has to wait, `told` hears once how long at most.
    pub async fn route(&self, mut inbound: Inbound, told: impl FnOnce(Duration)) -> Routed {
        let started = Instant::now();
        let pool = self.pool_of(&mut inbound);
        let edit = self.rewrite(&mut inbound, pool.as_deref());
        let Inbound {
            head,
            mut body,
            subset,
            ..
        } = inbound;
        let header = |name: &str| head.get(name);
        let mut taken = self.intake.take_for(pool, &head.path, &header, &body).await;
        taken.request.constraints.endpoints = self.selected(&head).or(subset);
        let model = label(&taken);
        let edit = match self.prefills.clean(&taken, &mut body) {
            Ok(clean) => Edit::with(edit, clean),
            Err(refused) => return self.refused(&refused, &head, &model),
        };
        let plan = self.prefills.plan(&mut taken, &head, &body, self.router());
        // A request may wait long for its turn, and its body need not, unless it is handed over.
        drop(body);
        for &(stage, took) in &taken.times {
            self.metrics.stage(stage, took);
        }
        if let Some(refused) = self.strict(&taken) {
            return self.refused(&refused, &head, &model);
        }
        if taken.query {
            return self.query(taken, &head, &model);
        }
        // Only the reply to a query contains them, and the request may wait for a long time.
        taken.tokens = Vec::new();
        let hashed = !matches!(taken.request.prompt, Prompt::Estimated { .. });
        let failure = self.failure_of(taken.request.model.as_ref());
        let pool = taken.request.constraints.pool.clone();
        let longest = plan.longest();
        let mut told = Some(told);
        let mut tell = |wait| _ = told.take().map(|told| told(wait + longest));
        let admitted = self
            .entrance
            .admit(taken.request, taken.session.as_ref(), &mut tell)
            .await;
        self.metrics.stage("total", started.elapsed());
        let carried = match admitted {
            Ok(admitted) => self.carry(admitted, plan, tell).await,
            Err(refusal) => Err(refusal),
        };
        let (admitted, carriage) = match carried {
            Ok(carried) => carried,
            Err(refusal) => {
                debug!(request_id = head.request_id, pool = pool.as_deref(), %refusal, "not routed");
                return self.refused(&Refused::Routing(&refusal, failure), &head, &model);
            }
        };
        let route = &admitted.booked.route;
        self.count(route, &model, hashed);
        let directions = Directions {
            copy: carriage.copy,
            ..self.directions(route, Edit::with(edit, carriage.body))
        };
        if enabled!(Level::DEBUG) {
            debug!(
                request_id = head.request_id,
                mode = route.mode.as_str(),
                prompt_tokens = route.prompt_tokens,
                predicted_cached_tokens = route.computed_by().cached_tokens,
                "routed {}",
                route.short()
            );
        }
        let remote = carriage.remote;
        Routed::Steered {
            directions: Box::new(directions),
            admitted: Some(Box::new(admitted)),
            remote,
        }
    }

    /// Does of the prefill what is ours to do before Envoy is told where to.
    async fn carry(
        &self,
        mut admitted: Admitted,
        plan: Plan<'_>,
        mut tell: impl FnMut(Duration),
    ) -> Result<(Admitted, Carriage), Refusal> {
        match plan {
            Plan::Call(call, api, wanted) if admitted.booked.route.prefill().is_some() => {
                tell(Duration::ZERO);
                let called = Called::new(call, api, wanted.request.clone());
                // Few requests take this way, and its future is large.
                let carrying = Box::pin(call.carry(&self.entrance, *wanted, admitted));
                let carried = carrying.await.map_err(Refusal::Refused)?;
                // Who took nothing over can be tried again as it is.
                let remote = carried
                    .body
                    .is_some()
                    .then(|| Remote::Called(Box::new(called)));
                Ok((
                    carried.admitted,
                    Carriage {
                        body: carried.body,
                        copy: None,
                        remote,
                    },
                ))
            }
            Plan::Meet(mirror, body, meeting) if admitted.booked.route.prefill().is_some() => {
                let (given, copy) = *meeting;
                let met = match copy {
                    None => mirror.meet(given, &body, &admitted.booked.route, self.router()),
                    Some(copy) => mirror
                        .meet_by_us(&self.entrance, &mut admitted, (given, &body, &copy))
                        .await
                        .ok(),
                };
                let met = met.ok_or(Refusal::Refused(RouteError::NoPrefill))?;
                Ok((admitted, Carriage::from(met)))
            }
            Plan::Named | Plan::Call(..) | Plan::Meet(..) => Ok((admitted, Carriage::default())),
        }
    }

    fn directions(&self, route: &Route, edit: Option<Edit>) -> Directions {
        Directions {
            steer: Steer {
                why: self.policy.why.then(|| route.short().into()),
                ..route.steer()
            },
            edit,
            copy: None,
            first_token_with_headers: self.policy.first_token_with_headers.contains(&route.model),
        }
    }

    /// The pool that a request is for: by the gateway's word, or else by its own looks.
    fn pool_of(&self, inbound: &mut Inbound) -> Option<Arc<str>> {
        let of_call = inbound.pool.take();
        of_call.or_else(|| {
            self.intake
                .pool_of(&inbound.head.path, &|name: &str| inbound.head.get(name))
        })
    }

    /// Replaces the model in the body, if a header or a rule says so, before anything else reads the body.
    fn rewrite(&self, inbound: &mut Inbound, pool: Option<&str>) -> Option<Edit> {
        let Body::Whole(body) = &inbound.body else {
            return None;
        };
        let header = |name: &str| inbound.head.get(name);
        let rewritten = self.intake.rewrite(pool, &header, body, rand::random())?;
        self.metrics.rewritten_models.inc();
        let served = rewritten.served;
        inbound.body = Body::Whole(rewritten.bytes.clone());
        Some(Edit {
            body: rewritten.bytes,
            restore: rewritten.requested.map(|asked| Renamed { served, asked }),
        })
    }

    /// The endpoints that a conformance test wants the choice to be among.
    fn selected(&self, head: &RequestHead) -> Option<Subset> {
        let selection = head
            .get(headers::CONFORMANCE_SELECTION)
            .filter(|_| self.policy.conformance)?;
        let selected = Subset::parse([&*selection]);
        let fleet = self.router().fleet();
        // Endpoints that nobody has are as good as none.
        fleet
            .workers()
            .any(|worker| selected.contains(worker.endpoint))
            .then_some(selected)
    }

    /// Why a request is not even tried, where the operator is strict.
    fn strict<'t>(&self, taken: &'t Taken) -> Option<Refused<'t>> {
        let failure = &self.policy.failure;
        let because = taken.request.prompt.because()?;
        let asked = taken.asked_model.as_deref();
        // Work that is none may name a model, too.
        let unknown =
            because == Reason::UnknownModel || (asked.is_some() && taken.request.model.is_none());
        match because {
            _ if unknown && failure.strict_models => {
                Some(Refused::UnknownModel(asked.unwrap_or_default()))
            }
            Reason::Unreadable if failure.strict_bodies => {
                Some(Refused::Unreadable(taken.unreadable.as_deref()))
            }
            Reason::BodyTooLarge if failure.strict_size => Some(Refused::TooLarge),
            _ => None,
        }
    }

    fn failure_of(&self, model: Option<&ModelName>) -> FailureMode {
        let own = model.and_then(|model| self.policy.failure_of.get(model));
        own.copied().unwrap_or(self.policy.failure.mode)
    }

    fn query(&self, taken: Taken, head: &RequestHead, model: &ModelLabel) -> Routed {
        let failure = self.failure_of(taken.request.model.as_ref());
        match self.entrance.ask(taken.request, taken.session.as_ref()) {
            Ok(route) => {
                self.request(model, "query", "none");
                Routed::Answered(reject::choice(&route, &taken.tokens))
            }
            Err(error) => self.refused(
                &Refused::Routing(&Refusal::Refused(error), failure),
                head,
                model,
            ),
        }
    }

    fn refused(&self, refused: &Refused<'_>, head: &RequestHead, model: &ModelLabel) -> Routed {
        self.degraded(refused.reason());
        match refused.immediate(&head.request_id, &self.policy) {
            Some(answer) => {
                self.request(model, "rejected", "none");
                Routed::Answered(answer)
            }
            None => {
                self.request(model, Steer::PASSTHROUGH.mode.as_str(), "none");
                Routed::Steered {
                    directions: Box::new(Steer::PASSTHROUGH.into()),
                    admitted: None,
                    remote: None,
                }
            }
        }
    }

    fn request(&self, model: &ModelLabel, mode: &'static str, role: &'static str) {
        self.metrics
            .requests
            .get_or_create(&RequestLabels {
                model: model.model.clone(),
                mode,
                role,
            })
            .inc();
    }

    fn degraded(&self, reason: Reason) {
        self.metrics
            .degradations
            .get_or_create(&ReasonLabel {
                reason: reason.as_str(),
            })
            .inc();
    }

    fn count(&self, route: &Route, label: &ModelLabel, hashed: bool) {
        self.metrics.stage("index", route.index_time);
        self.metrics.stage("choose", route.choose_time);
        let role = self
            .router()
            .role_of(route.to.rank)
            .map_or("unknown", Role::as_str);
        self.request(label, route.mode.as_str(), role);
        if let Some(reason) = route.reason {
            self.degraded(reason);
        }
        let phases = crate::metrics::PhasesLabel {
            phases: route.phases.as_str(),
        };
        self.metrics.phases.get_or_create(&phases).inc();
        if !hashed {
            return;
        }
        let computed_by = route.computed_by();
        let role = self
            .router()
            .role_of(computed_by.rank)
            .map_or("unknown", Role::as_str);
        let labels = &ModelRoleLabels {
            model: label.model.clone(),
            role,
        };
        self.metrics
            .prompt_tokens
            .get_or_create(labels)
            .observe(route.prompt_tokens as f64);
        self.metrics
            .hit_rate
            .get_or_create(labels)
            .observe(route.hit_rate());
        if route.shared_beyond_device > 0 {
            self.metrics
                .shared_cache_beyond_blocks
                .get_or_create(label)
                .inc_by(route.shared_beyond_device);
        }
        self.metrics
            .best_cached_tokens
            .get_or_create(labels)
            .inc_by(computed_by.best_cached_tokens);
        self.metrics
            .predicted_cached_tokens
            .get_or_create(labels)
            .inc_by(computed_by.cached_tokens);
        if computed_by.cached_tokens < computed_by.best_cached_tokens {
            self.metrics
                .non_max_overlap_choices
                .get_or_create(labels)
                .inc();
        }
    }
}

fn label(taken: &Taken) -> ModelLabel {
    let model = taken.request.model.as_ref();
    model.map_or_else(
        || ModelLabel {
            model: "unknown".to_owned(),
        },
        ModelLabel::from,
    )
}
