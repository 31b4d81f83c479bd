//! How the prefill of a request is carried out that is decided to be another worker's: planned before the request is let
//! in, because what cannot be handed over must not be divided, and done before Envoy is told where to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::HeaderValue;
use tracing::debug;

use super::contract::Contract;
use super::exchange::Copied;
use super::headers::{self, RequestHead};
use super::reject::{Refused, Unchecked};
use crate::disagg::Bypass;
use crate::intake::{Body, Taken};
use crate::openai::{Api, Shape};
use crate::prefill::{
    self, Call, Called, Cleaned, Copy, Given, Handing, Met, Mirror, Mirrored, Unfit, Wanted,
};
use crate::router::{Decoders, Router, Step};
use crate::worker::{ModelName, Role};

/// How prefills are carried out, model by model. Of models that are not here they are named and nothing else.
#[derive(Default)]
pub struct Prefills {
    /// By model.
    pub ways: HashMap<ModelName, Way>,
    /// Headers that only we may use.
    pub contract: Contract,
    /// Whether clients may say whose KV is to be taken.
    pub trusting: bool,
}

/// Who carries the prefills of a model out.
pub enum Way {
    /// We call the prefill worker first.
    Call(Arc<Call>),
    /// Envoy sends both workers the same.
    Mirror(Arc<Mirror>),
}

/// What is to be done for one request.
pub(super) enum Plan<'p> {
    /// Nothing but to name who was chosen.
    Named,
    /// The prefill worker is to be called, if one is chosen.
    Call(&'p Arc<Call>, Option<Api>, Box<Wanted>),
    /// Both workers are to meet over this body; the copy is ours to make where it is given.
    Meet(&'p Arc<Mirror>, Bytes, Box<(Given, Option<Copy>)>),
}

/// How a request goes on its way, beside where to.
#[derive(Default)]
pub(super) struct Carriage {
    /// Its body, where that is another now.
    pub(super) body: Option<Bytes>,
    /// Who gets a copy of it.
    pub(super) copy: Option<Copied>,
    /// What is to be known of its prefill later.
    pub(super) remote: Option<Remote>,
}

/// A request whose prefill is, or was, another worker's.
pub enum Remote {
    /// It was called for.
    Called(Box<Called>),
    /// The two workers meet.
    Meets(Box<Mirrored>),
}

impl Prefills {
    /// Takes out of a request what only we may say; the body, if that made it another. Whatever may say it unseen is not let
    /// through: it would be a way to what other clients said.
    pub(super) fn clean(
        &self,
        taken: &Taken,
        body: &mut Body,
    ) -> Result<Option<Bytes>, Refused<'static>> {
        let concerned = taken
            .request
            .model
            .as_ref()
            .is_none_or(|model| self.ways.contains_key(model));
        if self.ways.is_empty() || self.trusting || !concerned {
            return Ok(None);
        }
        let refuses = taken.api.is_some_and(|api| api.shape() == Shape::Prompt);
        match body {
            Body::Whole(bytes) => match prefill::clean(bytes) {
                Cleaned::Clean => Ok(None),
                Cleaned::Changed(clean) => {
                    *bytes = clean.clone();
                    Ok(Some(clean))
                }
                Cleaned::Unreadable if refuses => Err(Refused::Unchecked(Unchecked::Unreadable)),
                Cleaned::Unreadable => Ok(None),
            },
            Body::Cut { .. } | Body::TooLarge { .. } if refuses => {
                Err(Refused::Unchecked(Unchecked::TooLarge))
            }
            Body::Shed { .. } if refuses => Err(Refused::Unchecked(Unchecked::NoRoom)),
            _ => Ok(None),
        }
    }

    /// Plans for one request; what cannot be divided is to stay together.
    pub(super) fn plan(
        &self,
        taken: &mut Taken,
        head: &RequestHead,
        body: &Body,
        router: &Router,
    ) -> Plan<'_> {
        let model = taken.request.model.as_ref();
        let Some(way) = model.and_then(|model| self.ways.get(model)) else {
            return Plan::Named;
        };
        let has_prefills = model.is_some_and(|model| has_prefills(router, model));
        if let Way::Mirror(_) = way {
            // SGLang's decode workers refuse what brings no room.
            taken.request.decoders = Decoders::OnlyDecode;
        }
        if taken.query || !has_prefills {
            return Plan::Named;
        }
        let planned = if let Body::Whole(body) = body {
            self.divide(way, taken, head, body)
        } else {
            Err(Unfit::Body)
        };
        planned.unwrap_or_else(|unfit| {
            debug!(request_id = head.request_id, %unfit, "one worker does both phases");
            taken.request.step = Step::Together(Bypass::NotHandedOver);
            Plan::Named
        })
    }

    fn divide<'p>(
        &self,
        way: &'p Way,
        taken: &mut Taken,
        head: &RequestHead,
        body: &Bytes,
    ) -> Result<Plan<'p>, Unfit> {
        match way {
            Way::Call(call) => {
                let handing = Handing::new(taken.api, call.protocol, body)?;
                taken.request.step = Step::PrefillFirst { failed: Vec::new() };
                let request = taken.request.clone();
                let wanted = Wanted {
                    request,
                    handing,
                    headers: self.headers(head),
                    at: None,
                };
                Ok(Plan::Call(call, taken.api, Box::new(wanted)))
            }
            Way::Mirror(mirror) => {
                prefill::fits(taken.api, body)?;
                // An answer in one piece shows nothing of the prefill, so that is to be seen in another way.
                let path = prefill::path(taken.api.ok_or(Unfit::Api)?);
                let copy = || Copy {
                    path: path.to_owned(),
                    headers: self.headers(head),
                    at: None,
                };
                let copy = (!prefill::streams(body)).then(copy);
                let credentials = head
                    .get("authorization")
                    .and_then(|value| HeaderValue::from_str(&value).ok());
                let given = Given::new(taken.request.clone(), credentials);
                Ok(Plan::Meet(mirror, body.clone(), Box::new((given, copy))))
            }
        }
    }

    /// The headers of a request as workers get them.
    pub(super) fn headers(&self, head: &RequestHead) -> reqwest::header::HeaderMap {
        let sent = head.all.headers.iter();
        let sent = sent.map(|header| (header.key.as_str(), headers::bytes(header)));
        let mut map = prefill::forwarded(sent, |name| {
            self.contract.reserved().any(|reserved| reserved == name)
        });
        // One that came without a name has got one.
        if let Ok(name) = head.request_id.parse() {
            map.insert(headers::REQUEST_ID, name);
        }
        map
    }
}

impl Remote {
    /// How long another try of the request may take.
    pub(super) fn longest(&self) -> Duration {
        match self {
            Remote::Called(called) => called.longest(),
            Remote::Meets(_) => Duration::ZERO,
        }
    }
}

impl Plan<'_> {
    /// How long it may take.
    pub(super) fn longest(&self) -> Duration {
        match self {
            Plan::Named | Plan::Meet(..) => Duration::ZERO,
            Plan::Call(call, ..) => call.longest(),
        }
    }
}

impl From<Met> for Carriage {
    /// Both workers get the room to meet in, and Envoy the address of the second, if it makes the copy.
    fn from(
        Met {
            body,
            prefill,
            mirrored,
        }: Met,
    ) -> Self {
        let copy = mirrored.cluster().map(|cluster| Copied {
            cluster,
            to: prefill,
        });
        Self {
            body: Some(body),
            copy,
            remote: Some(Remote::Meets(Box::new(mirrored))),
        }
    }
}

fn has_prefills(router: &Router, model: &ModelName) -> bool {
    let fleet = router.fleet();
    let members = fleet
        .serving(model)
        .iter()
        .filter_map(|slot| fleet.member(*slot));
    members
        .into_iter()
        .any(|member| member.worker.role == Role::Prefill)
}
