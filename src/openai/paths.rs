//! Which path is which API. Gateways put prefixes before the paths of engines, and some rewrite them, so an API is told by
//! how its path ends, and operators can say it otherwise.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer, Serialize};

use super::Api;
use crate::settings::{Problem, Step};

macro_rules! paths {
    ($($(#[$doc:meta])* $key:ident: $api:ident = [$($suffix:literal),*];)*) => {
        /// `paths:`: the endings by which the path of a request tells its API. An empty list or null switches an API off:
        /// its requests are those of an unknown path then.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct PathsConfig {
            /// Headers with the path as the client sent it, for gateways that rewrite paths; looked at in this order where
            /// the path itself is unknown. None by default: a client can send them as well.
            pub headers: Vec<String>,
            $($(#[$doc])* #[serde(deserialize_with = "list_or_null")] pub $key: Vec<String>,)*
        }

        impl Default for PathsConfig {
            fn default() -> Self {
                Self { headers: Vec::new(), $($key: vec![$($suffix.to_owned()),*],)* }
            }
        }

        impl PathsConfig {
            fn lists(&self) -> impl Iterator<Item = (Api, &'static str, &[String])> {
                [$((Api::$api, stringify!($key), self.$key.as_slice()),)*].into_iter()
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
    /// Anthropic's count of tokens.
    count_tokens: CountTokens = ["messages/count_tokens"];
    /// OpenAI conversations.
    conversations: Conversations = ["conversations"];
    /// vLLM scores.
    score: Score = ["score"];
    /// Rerank, as Jina and Cohere have it.
    rerank: Rerank = ["rerank"];
    /// Text to tokens.
    tokenize: Tokenize = ["tokenize"];
    /// Tokens to text.
    detokenize: Detokenize = ["detokenize"];
    /// vLLM's rendering without generation.
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
    /// Images to images, without words.
    image_variations: ImageVariations = ["images/variations"];
    /// SGLang's own generation.
    sglang_generate: SglangGenerate = ["generate"];
    /// vLLM's generation from tokens.
    vllm_generate: VllmGenerate = ["inference/v1/generate"];
}

fn list_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl PathsConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut seen: Vec<(&str, &str)> = Vec::new();
        for (_, key, list) in self.lists() {
            for (at, written) in list.iter().enumerate() {
                let place = [Step::from(key), at.into()];
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
            .filter(|(_, name)| !is_header(name))
        {
            let text =
                format!("`{name}` is not the name of a header; write for example x-original-path");
            problems.push(Problem::at([Step::from("headers"), at.into()], text));
        }
        problems
    }
}

fn is_header(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

/// A path without percent signs, where they stand for text.
fn decoded(path: &str) -> String {
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

/// Which path is which API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Endings without slashes around them, the longest first.
    suffixes: Vec<(Box<str>, Api)>,
    headers: Vec<String>,
}

impl Default for Paths {
    fn default() -> Self {
        Self::new(&PathsConfig::default())
    }
}

impl Paths {
    /// The paths that are configured.
    pub fn new(config: &PathsConfig) -> Self {
        let endings = |(api, _, list): (Api, _, &[String])| -> Vec<(Box<str>, Api)> {
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

    /// The API of a path: by its longest known ending of whole segments, without its query and slashes at its end.
    pub fn find(&self, path: &str) -> Option<Api> {
        let path = path.split_once(['?', '#']).map_or(path, |(path, _)| path);
        // Engines decode paths, so that another spelling must not be a way past us.
        let decoded = path.contains('%').then(|| decoded(path));
        let path = decoded.as_deref().unwrap_or(path).trim_end_matches('/');
        let ends = |suffix: &str| {
            path.strip_suffix(suffix)
                .is_some_and(|before| before.is_empty() || before.ends_with('/'))
        };
        self.suffixes
            .iter()
            .find(|(suffix, _)| ends(suffix))
            .map(|(_, api)| *api)
    }

    /// The API of a request: of its path, or else of the first configured header whose path is known.
    pub fn of<'h>(&self, path: &str, header: impl Fn(&str) -> Option<Cow<'h, str>>) -> Option<Api> {
        let by_header = || {
            self.headers
                .iter()
                .find_map(|name| self.find(header(name)?.trim()))
        };
        self.find(path).or_else(by_header)
    }
}
