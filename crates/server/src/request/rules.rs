//! Configured rules and rules of the cluster, applied to one request: its pool, its model, its
//! priority and its session.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use warmroute_tokens::openai::{self, SessionControl};

use super::cluster_rules::ClusterRules;
use super::pool_routes::PoolAuthorities;
use super::preprocessor::{PreprocessorParts, RequestPreprocessor};
use super::rewrite::{RequestedModel, RewrittenBody};
use super::routing_hints::HeaderLookup;
use crate::dispatch::RequestSession;

impl RequestPreprocessor {
    /// Returns the pools by the authority of a call.
    pub fn pool_authorities(&self) -> &PoolAuthorities {
        &self.pool_authorities
    }

    /// Returns the pool of a request; `None` allows any worker.
    pub fn pool_of(&self, path: &str, headers: HeaderLookup<'_>) -> Option<Arc<str>> {
        self.parts.pool_routes.pool_of(path, headers)
    }

    /// Replaces the model of a body, if a header or a rule requires it. `random` is at least 0 and
    /// below 1, and selects among weighted models.
    pub fn rewrite_model(
        &self,
        pool: Option<&str>,
        headers: HeaderLookup<'_>,
        body: &Bytes,
        random: f64,
    ) -> Option<RewrittenBody> {
        let PreprocessorParts {
            rewrites,
            rewrite_headers,
            ..
        } = &self.parts;
        let header = rewrite_headers
            .iter()
            .find_map(|name| headers(name))
            .map(Cow::into_owned);
        let cluster = self.cluster_rules();
        if rewrites.is_empty() && cluster.rewrites().is_empty() && header.is_none() {
            return None;
        }
        let requested = openai::read_model(body);
        // A long name is not rewritten, because the requested name is restored in every piece of
        // the response.
        let is_too_long = |name: &str| name.len() > openai::MAX_MODEL_NAME_BYTES;
        if [&requested, &header]
            .into_iter()
            .flatten()
            .any(|name| is_too_long(name))
        {
            return None;
        }
        let model = RequestedModel {
            name: requested.as_deref(),
            header: header.as_deref(),
            pool,
        };
        let chosen = rewrites.choose_model(cluster.rewrites(), model, random);
        let served = chosen.filter(|name| !is_too_long(name))?.to_owned();
        // A body that is not a JSON object has no model. The engine rejects it.
        let bytes: Bytes = openai::json_edit::set_model(body, &served)?.into();
        Some(RewrittenBody {
            bytes,
            served,
            requested,
        })
    }

    /// Returns the current rules of the cluster.
    pub fn cluster_rules(&self) -> Arc<ClusterRules> {
        self.parts.cluster.load_full()
    }

    /// Returns the priority of the objective that a request names. Every client may name an
    /// objective, because only the cluster defines objectives.
    pub(super) fn objective_priority(
        &self,
        headers: HeaderLookup<'_>,
        pool: Option<&str>,
    ) -> Option<i64> {
        let cluster = self.parts.cluster.load();
        let names = self
            .parts
            .clients
            .objective_headers
            .iter()
            .filter(|_| cluster.has_objectives());
        let name = names.filter_map(|header| headers(header)).next()?;
        cluster.priority(name.trim(), pool)
    }

    /// Returns the tenant of the client, if `requests.clients.tenant_header` is set.
    pub(super) fn tenant(&self, headers: HeaderLookup<'_>) -> Option<String> {
        let tenant = self
            .parts
            .clients
            .tenant_header
            .as_deref()
            .and_then(headers);
        tenant
            .map(|value| value.trim().to_owned())
            .filter(|tenant| !tenant.is_empty())
    }

    /// Returns the session of a request, with its tenant.
    pub(super) fn session(
        &self,
        headers: HeaderLookup<'_>,
        in_body: Option<String>,
        control: Option<&SessionControl>,
    ) -> Option<RequestSession> {
        let session = self
            .parts
            .session_fields
            .as_ref()?
            .parse(headers, in_body, control)?;
        Some(RequestSession {
            tenant: self.tenant(headers),
            ..session
        })
    }
}
