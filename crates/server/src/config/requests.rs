//! `requests:`: interpretation and limits of requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_settings::{Problem, all_within, header_name_problems};
use warmroute_tokens::openai::paths::{ApiPaths, ApiPathsConfig, suffix_problems};

use crate::ext_proc::config::LimitsConfig;
use crate::request::config::ClientsConfig;

/// The `requests:` section.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RequestsSection {
    /// APIs by the end of the path, which extend or override the defaults. Null: requests are
    /// handled like those of an unknown path.
    pub paths: ApiPathsConfig,
    /// Headers that carry the original path, for gateways that rewrite paths. They are read in this
    /// order if the path itself is unknown. Empty by default, because clients can set headers too.
    pub path_headers: Vec<String>,
    /// Routing hints that clients may give.
    pub clients: ClientsConfig,
    /// Limits of request processing.
    pub limits: LimitsConfig,
}

impl RequestsSection {
    /// Returns the mapping of request paths to APIs.
    pub fn api_paths(&self) -> ApiPaths {
        ApiPaths::new(&self.paths, &self.path_headers)
    }

    /// Returns the invalid path suffixes and header names.
    pub fn path_problems(&self) -> Vec<Problem> {
        let suffixes = all_within("paths", suffix_problems(&self.paths));
        let headers = header_name_problems("path_headers", &self.path_headers, "x-original-path");
        suffixes.chain(headers).collect()
    }
}
