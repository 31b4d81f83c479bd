//! `requests:`: interpretation and limits of requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_settings::{PathStep, Problem, is_header_name};
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
        let suffixes = suffix_problems(&self.paths).into_iter();
        let headers = self.path_headers.iter().enumerate();
        let headers = headers.filter(|(_, name)| !is_header_name(name));
        let headers = headers.map(|(at, name)| {
            let text =
                format!("`{name}` is not the name of a header; write for example x-original-path");
            Problem::at([PathStep::from("path_headers"), at.into()], text)
        });
        let suffixes = suffixes.map(|problem| problem.within("paths"));
        suffixes.chain(headers).collect()
    }
}
