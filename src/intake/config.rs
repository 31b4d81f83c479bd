//! Settings of the way in: whom we believe.

use serde::{Deserialize, Serialize};

use crate::settings::Problem;

/// `clients:`: what clients may say about routing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientsConfig {
    /// Clients may pin workers, set priorities, weights and taints, and ask for the choice alone, by headers and by
    /// `nvext`. Off by default: anybody could choose a worker or go before everybody else.
    pub trusted: bool,
    /// Header whose value separates the caches of tenants, where the engines read it as well, as Dynamo's front ends do.
    pub tenant_header: Option<String>,
}

impl ClientsConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let bad = |name: &&String| {
            name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        let name = self.tenant_header.as_ref().filter(bad);
        let text = |name: &String| format!("`{name}` is not the name of a header; write for example x-tenant-id");
        name.map(|name| Problem::of("tenant_header", text(name))).into_iter().collect()
    }
}
