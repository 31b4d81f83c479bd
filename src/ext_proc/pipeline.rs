//! From a request as Envoy shows it to what Envoy is told: read it, let it in, count it. Every failure on the way is one
//! step down the ladder, counted; an error for the client only where the operator or the request itself wants one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{Level, debug, enabled};

use super::exchange::Inbound;
use super::mutation::Immediate;
use super::reject;
use crate::entrance::{Admitted, Entrance, Refusal};
use crate::intake::{Intake, Taken};
use crate::metrics::{Metrics, ModelLabel, ReasonLabel, RequestLabels};
use crate::router::{Prompt, Reason, Route, Router, Steer};

/// What became of one request.
pub enum Routed {
    /// Envoy forwards it.
    Steered {
        /// What Envoy is told.
        steer: Steer,
        /// What the request holds, if it was let in.
        admitted: Option<Box<Admitted>>,
    },
    /// The client gets this.
    Answered(Immediate),
}

/// The request path between Envoy's messages and the router.
pub struct Pipeline {
    intake: Arc<Intake>,
    entrance: Arc<Entrance>,
    metrics: Arc<Metrics>,
    /// Whether answers say why; making the line costs a microsecond.
    why: bool,
}

impl Pipeline {
    /// A pipeline to a router. `why` makes each route carry its reason in short.
    pub fn new(intake: Arc<Intake>, entrance: Arc<Entrance>, metrics: Arc<Metrics>, why: bool) -> Arc<Self> {
        Arc::new(Self { intake, entrance, metrics, why })
    }

    /// The router behind it.
    pub fn router(&self) -> &Arc<Router> {
        self.entrance.router()
    }

    /// Finds the workers for one request. Where it has to wait, `told` hears once how long at most.
    pub async fn route(&self, inbound: &Inbound, told: impl FnOnce(Duration)) -> Routed {
        let started = Instant::now();
        let headers = |name: &str| inbound.head.get(name);
        let taken = self.intake.take(&inbound.head.path, &headers, &inbound.body).await;
        for &(stage, took) in &taken.times {
            self.metrics.stage(stage, took);
        }
        let (model, hashed) = (label(&taken), matches!(taken.request.prompt, Prompt::Hashed(_)));
        if taken.query {
            return self.query(taken, &model);
        }
        let admitted = self.entrance.admit(taken.request, taken.session.as_ref(), told).await;
        self.metrics.stage("total", started.elapsed());
        let request_id = &inbound.head.request_id;
        match admitted {
            Ok(admitted) => {
                let route = &admitted.booked.route;
                self.count(route, &model, hashed);
                let steer = Steer { why: self.why.then(|| route.short().into()), ..route.steer() };
                if enabled!(Level::DEBUG) {
                    debug!(
                        request_id,
                        mode = route.mode.as_str(),
                        prompt_tokens = route.prompt_tokens,
                        predicted_cached_tokens = route.predicted_cached_tokens,
                        "routed {}",
                        route.short()
                    );
                }
                Routed::Steered { steer, admitted: Some(Box::new(admitted)) }
            }
            Err(refusal) => {
                debug!(request_id, %refusal, "not routed");
                self.refused(&refusal, &model)
            }
        }
    }

    fn query(&self, taken: Taken, model: &ModelLabel) -> Routed {
        match self.entrance.ask(taken.request, taken.session.as_ref()) {
            Ok(route) => {
                self.request(model, "query");
                Routed::Answered(reject::choice(&route, &taken.tokens))
            }
            Err(error) => self.refused(&Refusal::Refused(error), model),
        }
    }

    fn refused(&self, refusal: &Refusal, model: &ModelLabel) -> Routed {
        self.degraded(reject::reason(refusal));
        match reject::immediate(refusal) {
            Some(answer) => {
                self.request(model, "rejected");
                Routed::Answered(answer)
            }
            None => {
                self.request(model, Steer::PASSTHROUGH.mode.as_str());
                Routed::Steered { steer: Steer::PASSTHROUGH, admitted: None }
            }
        }
    }

    fn request(&self, model: &ModelLabel, mode: &'static str) {
        self.metrics.requests.get_or_create(&RequestLabels { model: model.model.clone(), mode }).inc();
    }

    fn degraded(&self, reason: Reason) {
        self.metrics.degradations.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }

    fn count(&self, route: &Route, label: &ModelLabel, hashed: bool) {
        self.metrics.stage("index", route.index_time);
        self.metrics.stage("choose", route.choose_time);
        self.request(label, route.mode.as_str());
        if let Some(reason) = route.reason {
            self.degraded(reason);
        }
        let phases = crate::metrics::PhasesLabel { phases: route.phases.as_str() };
        self.metrics.phases.get_or_create(&phases).inc();
        if !hashed {
            return;
        }
        self.metrics.prompt_tokens.get_or_create(label).observe(route.prompt_tokens as f64);
        self.metrics.hit_rate.get_or_create(label).observe(route.hit_rate());
        self.metrics.best_cached_tokens.get_or_create(label).inc_by(route.best_cached_tokens);
        self.metrics.predicted_cached_tokens.get_or_create(label).inc_by(route.predicted_cached_tokens);
        if route.predicted_cached_tokens < route.best_cached_tokens {
            self.metrics.non_max_overlap_choices.get_or_create(label).inc();
        }
    }
}

fn label(taken: &Taken) -> ModelLabel {
    let model = taken.request.model.as_ref();
    model.map_or_else(|| ModelLabel { model: "unknown".to_owned() }, ModelLabel::from)
}
