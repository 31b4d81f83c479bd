//! Mapping of request paths to APIs. Gateways add prefixes to the paths of engines, so the suffix
//! of the path determines the API. Some gateways rewrite paths, so the suffixes are configurable.

use std::borrow::Cow;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::ApiKind;
use warmroute_settings::{PathStep, Problem};

macro_rules! paths {
    ($($(#[$doc:meta])* $key:ident: $api:ident = [$($suffix:literal),*];)*) => {
        /// `paths:`: the path suffixes of each API. An empty list or null disables an API: its
        /// requests are handled like those of an unknown path.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct ApiPathsConfig {
            /// Headers that carry the original path, for gateways that rewrite paths. They are read
            /// in this order if the path itself is unknown. Empty by default, because clients can
            /// set headers too.
            pub headers: Vec<String>,
            $($(#[$doc])* #[serde(deserialize_with = "list_or_null")] #[schemars(with = "Option<Vec<String>>")] pub $key: Vec<String>,)*
        }

        impl Default for ApiPathsConfig {
            fn default() -> Self {
                Self { headers: Vec::new(), $($key: vec![$($suffix.to_owned()),*],)* }
            }
        }

        impl ApiPathsConfig {
            fn lists(&self) -> impl Iterator<Item = (ApiKind, &'static str, &[String])> {
                [$((ApiKind::$api, stringify!($key), self.$key.as_slice()),)*].into_iter()
            }
        }
    };
}

paths! {
    /// OpenAI chat completions.
    chat_completions: ChatCompletions = ["chat/completions"];
    /// OpenAI completions.
    completions: Completions = ["completions"];
    /// OpenAI embeddings.
    embeddings: Embeddings = ["embeddings"];
    /// vLLM pooling.
    pooling: Pooling = ["pooling"];
    /// vLLM classification.
    classify: Classify = ["classify"];
    /// OpenAI responses.
    responses: Responses = ["responses"];
    /// Anthropic messages.
    messages: Messages = ["v1/messages"];
    /// Anthropic token counting.
    count_tokens: CountTokens = ["messages/count_tokens"];
    /// OpenAI conversations.
    conversations: Conversations = ["conversations"];
    /// vLLM scores and decisions, whose prompts the engine builds.
    score: Score = ["score", "v1/decisions", "v1/systemone"];
    /// Rerank, as defined by Jina and Cohere.
    rerank: Rerank = ["rerank"];
    /// Text to tokens.
    tokenize: Tokenize = ["tokenize"];
    /// Tokens to text.
    detokenize: Detokenize = ["detokenize"];
    /// vLLM prompt rendering without generation.
    render: Render = ["chat/completions/render", "completions/render", "responses/render", "messages/render"];
    /// The list of models.
    models: Models = ["v1/models"];
    /// Speech to text.
    transcriptions: Transcriptions = ["audio/transcriptions"];
    /// Speech to English text.
    translations: Translations = ["audio/translations"];
    /// Text to speech.
    speech: Speech = ["audio/speech"];
    /// Text to images.
    image_generations: ImageGenerations = ["images/generations"];
    /// Images to images.
    image_edits: ImageEdits = ["images/edits"];
    /// Images to images without a prompt.
    image_variations: ImageVariations = ["images/variations"];
    /// SGLang's native generation.
    sglang_generate: SglangGenerate = ["generate"];
    /// vLLM's generation from token ids.
    vllm_generate: VllmGenerate = ["inference/v1/generate"];
}

fn list_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl ApiPathsConfig {
    /// Returns the invalid suffixes and header names.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut seen: Vec<(&str, &str)> = Vec::new();
        for (_, key, list) in self.lists() {
            for (at, written) in list.iter().enumerate() {
                let place = [PathStep::from(key), at.into()];
                let suffix = written.trim_matches('/');
                if suffix.is_empty() || suffix.contains(['?', '#', ' ']) {
                    let text = format!(
                        "`{written}` is not the end of a path; write for example chat/completions"
                    );
                    problems.push(Problem::at(place, text));
                } else if let Some((other, _)) = seen.iter().find(|(_, known)| *known == suffix) {
                    let text = format!(
                        "`{written}` is a path of `{other}` already; leave one of them out"
                    );
                    problems.push(Problem::at(place, text));
                } else {
                    seen.push((key, suffix));
                }
            }
        }
        for (at, name) in self
            .headers
            .iter()
            .enumerate()
            .filter(|(_, name)| !is_header_name(name))
        {
            let text =
                format!("`{name}` is not the name of a header; write for example x-original-path");
            problems.push(Problem::at([PathStep::from("headers"), at.into()], text));
        }
        problems
    }
}

fn is_header_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

/// Decodes percent escapes. Invalid escapes are not changed.
fn percent_decode(path: &str) -> String {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [first, after @ ..] = rest {
        let digit = |at: usize| char::from(*after.get(at)?).to_digit(16);
        let code = (*first == b'%')
            .then(|| Some(digit(0)? << 4 | digit(1)?))
            .flatten();
        bytes.push(
            code.and_then(|code| u8::try_from(code).ok())
                .unwrap_or(*first),
        );
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns a path without its query and trailing slashes. Engines decode paths, so an encoded path
/// must not bypass routing.
fn plain_path(path: &str) -> Cow<'_, str> {
    let path = path.split_once(['?', '#']).map_or(path, |(path, _)| path);
    if path.contains('%') {
        percent_decode(path).trim_end_matches('/').to_owned().into()
    } else {
        path.trim_end_matches('/').into()
    }
}

/// Path suffixes of the APIs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiPaths {
    /// Suffixes without surrounding slashes, longest first.
    suffixes: Vec<(Box<str>, ApiKind)>,
    headers: Vec<String>,
}

impl Default for ApiPaths {
    fn default() -> Self {
        Self::new(&ApiPathsConfig::default())
    }
}

impl ApiPaths {
    /// Creates the mapping of a configuration.
    pub fn new(config: &ApiPathsConfig) -> Self {
        let endings = |(api, _, list): (ApiKind, _, &[String])| -> Vec<(Box<str>, ApiKind)> {
            list.iter()
                .map(|suffix| (suffix.trim_matches('/').into(), api))
                .collect()
        };
        let mut suffixes: Vec<_> = config
            .lists()
            .flat_map(endings)
            .filter(|(suffix, _)| !suffix.is_empty())
            .collect();
        suffixes.sort_by_key(|(suffix, _)| std::cmp::Reverse(suffix.len()));
        let headers = config
            .headers
            .iter()
            .map(|name| name.to_ascii_lowercase())
            .collect();
        Self { suffixes, headers }
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
        let ends = |suffix: &str| {
            path.strip_suffix(suffix)
                .is_some_and(|before| before.is_empty() || before.ends_with('/'))
        };
        self.suffixes
            .iter()
            .find(|(suffix, _)| ends(suffix))
            .map(|(_, api)| *api)
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
