//! Configuration of clients.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{Problem, header_name_problem, header_name_problems};

use super::routing_hints::HeaderLookup;

/// The `requests.clients:` section: routing hints of clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClientsConfig {
    /// Clients may pin workers, set priorities, weights and taints, and query the routing decision,
    /// with headers and `nvext`. Off by default, because any client could choose a worker or
    /// overtake others. With the header profile `dynamo`, `token_data` and `cache_salt` of `nvext`
    /// are accepted from every client, because they change the prompt or its blocks.
    pub trusted: bool,
    /// Header that separates the caches of tenants. The engines must read it as well, as Dynamo's
    /// front ends do.
    pub tenant_header: Option<String>,
    /// Headers with the name of an InferenceObjective, which sets the priority. The first present
    /// one is used.
    pub objective_headers: Vec<String>,
}

impl Default for ClientsConfig {
    fn default() -> Self {
        let objective = [
            "x-llm-d-inference-objective",
            "x-gateway-inference-objective",
        ];
        Self {
            trusted: false,
            tenant_header: None,
            objective_headers: objective.map(str::to_owned).to_vec(),
        }
    }
}

impl ClientsConfig {
    /// Returns the tenant of a client, if its header is configured.
    pub(super) fn tenant(&self, headers: HeaderLookup<'_>) -> Option<String> {
        let tenant = self.tenant_header.as_deref().and_then(headers)?;
        Some(tenant.trim().to_owned()).filter(|tenant| !tenant.is_empty())
    }

    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let tenant = self.tenant_header.iter();
        tenant
            .filter_map(|name| header_name_problem("tenant_header", name, "x-tenant-id"))
            .chain(header_name_problems(
                "objective_headers",
                &self.objective_headers,
                "x-gateway-inference-objective",
            ))
            .collect()
    }
}
