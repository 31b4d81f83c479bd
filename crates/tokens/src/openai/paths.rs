//! Mapping of request paths to APIs. Gateways add prefixes to the paths of engines, so the suffix
//! of the path determines the API. Some gateways rewrite paths, so the suffixes are configurable.

use std::borrow::Cow;
use std::collections::BTreeMap;

use percent_encoding::percent_decode_str;

use super::api::ApiKind;
use warmroute_settings::Problem;

/// `requests.paths:`: APIs by path suffix, which extend or override the defaults. `None`: requests
/// are handled like those of an unknown path.
pub type ApiPathsConfig = BTreeMap<String, Option<ApiKind>>;

/// APIs of path suffixes that the configuration does not override.
const DEFAULT_PATHS: [(&str, ApiKind); 28] = [
    ("chat/completions", ApiKind::ChatCompletions),
    ("completions", ApiKind::Completions),
    ("embeddings", ApiKind::Embeddings),
    ("pooling", ApiKind::Pooling),
    ("classify", ApiKind::Classify),
    ("responses", ApiKind::Responses),
    ("v1/messages", ApiKind::Messages),
    ("messages/count_tokens", ApiKind::CountTokens),
    ("conversations", ApiKind::Conversations),
    ("score", ApiKind::Score),
    ("v1/decisions", ApiKind::Score),
    ("v1/systemone", ApiKind::Score),
    ("rerank", ApiKind::Rerank),
    ("tokenize", ApiKind::Tokenize),
    ("detokenize", ApiKind::Detokenize),
    ("chat/completions/render", ApiKind::Render),
    ("completions/render", ApiKind::Render),
    ("responses/render", ApiKind::Render),
    ("messages/render", ApiKind::Render),
    ("v1/models", ApiKind::Models),
    ("audio/transcriptions", ApiKind::Transcriptions),
    ("audio/translations", ApiKind::Translations),
    ("audio/speech", ApiKind::Speech),
    ("images/generations", ApiKind::ImageGenerations),
    ("images/edits", ApiKind::ImageEdits),
    ("images/variations", ApiKind::ImageVariations),
    ("generate", ApiKind::SglangGenerate),
    ("inference/v1/generate", ApiKind::VllmGenerate),
];

/// Returns the invalid suffixes of a configuration.
pub fn suffix_problems(config: &ApiPathsConfig) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut seen = BTreeMap::new();
    let configured = config.iter().filter(|(_, api)| api.is_some());
    let configured = configured.map(|(suffix, _)| suffix.trim_matches('/'));
    let endings: Vec<_> = DEFAULT_PATHS
        .iter()
        .map(|(suffix, _)| *suffix)
        .chain(configured)
        .collect();
    for (written, api) in config {
        let suffix = written.trim_matches('/');
        if suffix.is_empty() || suffix.contains(['?', '#', ' ']) {
            let text =
                format!("`{written}` is not the end of a path; write for example chat/completions");
            problems.push(Problem::of(written, text));
        } else if api.is_none() && !endings.iter().any(|known| ends_with(suffix, known)) {
            let text = format!("no API has the path `{written}`, so null has no effect");
            problems.push(Problem::of(written, text));
        } else if let Some(other) = seen.insert(suffix, written) {
            let text = format!("`{written}` is the same path as `{other}`; leave one of them out");
            problems.push(Problem::of(written, text));
        }
    }
    problems
}

/// Returns true if a path ends with whole segments.
fn ends_with(path: &str, suffix: &str) -> bool {
    path.strip_suffix(suffix)
        .is_some_and(|before| before.is_empty() || before.ends_with('/'))
}

/// Returns a path without its query and trailing slashes. Engines decode paths, so an encoded path
/// must not bypass routing.
fn plain_path(path: &str) -> Cow<'_, str> {
    let path = path.split_once(['?', '#']).map_or(path, |(path, _)| path);
    match percent_decode_str(path).decode_utf8_lossy() {
        Cow::Borrowed(path) => path.trim_end_matches('/').into(),
        Cow::Owned(path) => path.trim_end_matches('/').to_owned().into(),
    }
}

/// Path suffixes of the APIs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiPaths {
    /// Suffixes without surrounding slashes, longest first.
    suffixes: Vec<(Box<str>, Option<ApiKind>)>,
    headers: Vec<String>,
}

impl Default for ApiPaths {
    fn default() -> Self {
        Self::new(&ApiPathsConfig::default(), &[])
    }
}

impl ApiPaths {
    /// Creates the mapping of a configuration. `headers` are the names of the headers that carry
    /// the original path.
    pub fn new(config: &ApiPathsConfig, headers: &[String]) -> Self {
        let mut by_suffix: BTreeMap<&str, Option<ApiKind>> = DEFAULT_PATHS
            .map(|(suffix, api)| (suffix, Some(api)))
            .into();
        let configured = config.iter();
        by_suffix.extend(configured.map(|(suffix, api)| (suffix.trim_matches('/'), *api)));
        let mut suffixes: Vec<_> = by_suffix
            .into_iter()
            .map(|(suffix, api)| (suffix.into(), api))
            .collect();
        suffixes.sort_by_key(|(suffix, _): &(Box<str>, _)| std::cmp::Reverse(suffix.len()));
        let headers = headers.iter().map(|name| name.to_ascii_lowercase());
        Self {
            suffixes,
            headers: headers.collect(),
        }
    }

    /// Returns the API of a path by its longest known suffix of whole segments. The query and
    /// trailing slashes are ignored.
    pub fn find_api(&self, path: &str) -> Option<ApiKind> {
        self.api_of_plain_path(&plain_path(path))
    }

    /// Returns the id in the path of a stored response: the segment after a path of the Responses
    /// API, alone or with an action such as `cancel` or `input_items`.
    pub fn stored_response_id(&self, path: &str) -> Option<String> {
        let path = plain_path(path);
        if self.api_of_plain_path(&path).is_some() {
            return None;
        }
        let id_of = |path: &str| {
            let (before, id) = path.rsplit_once('/')?;
            let is_response = self.api_of_plain_path(before) == Some(ApiKind::Responses);
            (is_response && !id.is_empty()).then(|| id.to_owned())
        };
        let without_action = path.rsplit_once('/').map(|(before, _)| before);
        id_of(&path).or_else(|| id_of(without_action?))
    }

    fn api_of_plain_path(&self, path: &str) -> Option<ApiKind> {
        self.suffixes
            .iter()
            .find(|(suffix, _)| ends_with(path, suffix))
            .and_then(|(_, api)| *api)
    }

    /// Returns the API of a request. If its path is unknown, uses the first configured header that
    /// has a known path.
    pub fn api_of_request<'h>(
        &self,
        path: &str,
        header: impl Fn(&str) -> Option<Cow<'h, str>>,
    ) -> Option<ApiKind> {
        let by_header = || {
            self.headers
                .iter()
                .find_map(|name| self.find_api(header(name)?.trim()))
        };
        self.find_api(path).or_else(by_header)
    }
}
