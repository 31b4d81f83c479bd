//! `requests:`: interpretation and limits of requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_tokens::openai::paths::ApiPathsConfig;

use crate::ext_proc::config::LimitsConfig;
use crate::request::config::ClientsConfig;

/// The `requests:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RequestsSection {
    /// API of each request path.
    pub paths: ApiPathsConfig,
    /// Routing hints that clients may give.
    pub clients: ClientsConfig,
    /// Limits of request processing.
    pub limits: LimitsConfig,
}
