//! State of an exchange that its request side and its response side read.

use std::sync::Arc;

use warmroute_core::policy::EndpointSubset;

use super::effect::{Effect, InboundRequest};
use super::options::{ExchangeOptions, ExchangeStart, ServingWorker};
use crate::ext_proc::headers::RequestHead;
use crate::ext_proc::message::BodyModes;
use crate::ext_proc::reply::RouteReply;
use crate::request::RequestBody;

/// State that both sides read.
#[derive(Debug)]
pub(super) struct ExchangeContext {
    pub(super) options: Arc<ExchangeOptions>,
    pub(super) start: ExchangeStart,
    pub(super) modes: BodyModes,
    pub(super) subset: Option<EndpointSubset>,
    pub(super) pool: Option<String>,
    pub(super) route_reply: Option<RouteReply>,
    /// The worker that sent the response, if it is not the chosen one.
    pub(super) served_by: Option<ServingWorker>,
}

impl ExchangeContext {
    /// Creates the state of an exchange that has received no message.
    pub(super) fn new(options: Arc<ExchangeOptions>, start: ExchangeStart) -> Self {
        Self {
            modes: options.assumed_modes,
            options,
            start,
            subset: None,
            pool: None,
            route_reply: None,
            served_by: None,
        }
    }

    /// Returns the effect that requests a route.
    pub(super) fn route_effect(&self, head: RequestHead, body: RequestBody) -> Effect {
        let pool = self
            .pool
            .as_deref()
            .map(Arc::from)
            .or_else(|| self.start.pool.clone());
        Effect::Route(InboundRequest {
            head,
            body,
            subset: self.subset.clone(),
            pool,
        })
    }
}
