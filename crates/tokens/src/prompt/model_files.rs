//! Model files: tokenizer, tokenizer configuration, special tokens and chat templates, read as
//! transformers reads them. Files that contradict each other are rejected, because the engine
//! resolves the conflict in its own way.

mod bpe_file;
mod fingerprint;
mod tokenizer_source;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::read::GzDecoder;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use thiserror::Error;
use tokenizers::Tokenizer;
use warmroute_settings::{ByteSize, read_limited, read_regular_file};

use super::engine::{EngineKind, ModelTraits, TransformersVersion};
use super::fast::{FastPath, VerifiedTokenizer};
use super::rebuild::{SPECIAL_TOKENS, TokenizerClass, TokenizerMetadata};
pub use fingerprint::ModelFingerprint;
use tokenizer_source::TokenizerSource;

/// Maximum size of a file of a model, also after decompression.
pub(crate) const MAX_MODEL_FILE: ByteSize = ByteSize::mib(256);

/// Files of one model's tokenizer and chat template. They may be `.json` or `.json.gz`.
#[derive(Deserialize, Serialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// `tokenizer.json` of the model.
    pub tokenizer: PathBuf,
    /// `tokenizer_config.json`; by default the one next to the tokenizer, if present. The model's
    /// `config.json` is expected next to it.
    pub tokenizer_config: Option<PathBuf>,
    /// Chat template that overrides the model's own, like the engine's `--chat-template`.
    pub chat_template: Option<PathBuf>,
}

/// A model's files cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file has unexpected content.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A chat template cannot be reproduced exactly.
    #[error("{}: chat template `{name}`: {problem}", path.display())]
    Template {
        /// The template's file.
        path: PathBuf,
        /// The template's name.
        name: String,
        /// The unsupported feature or the syntax error.
        problem: String,
    },
}

impl LoadError {
    pub(super) fn content(path: &Path, problem: impl Into<String>) -> Self {
        Self::Content {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    /// Returns the affected file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Read { path, .. } | Self::Content { path, .. } | Self::Template { path, .. } => {
                path
            }
        }
    }
}

/// Content of a model's files.
pub(super) struct ModelFiles {
    pub tokenizer: Arc<VerifiedTokenizer>,
    pub templates: Option<TemplateSources>,
    pub special_tokens: Vec<(&'static str, String)>,
    /// Reason why it is uncertain which special tokens the engine adds.
    pub special_tokens_mismatch: Option<String>,
}

/// Chat templates by name, and their file.
pub(super) struct TemplateSources {
    pub path: PathBuf,
    pub named: Vec<(String, String)>,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<ChatTemplateField>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    split_special_tokens: Option<bool>,
    tokenizer_class: Option<String>,
    legacy: Option<bool>,
    add_prefix_space: Option<bool>,
    auto_map: Option<Value>,
    fix_mistral_regex: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ChatTemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// Name of the model configuration next to the tokenizer.
const MODEL_CONFIG_NAME: &str = "config.json";

#[derive(Default, Deserialize)]
struct ModelConfigFile {
    model_type: Option<String>,
    tokenizer_class: Option<String>,
}

/// Reads `config.json` of the model. Only transformers 5 uses it.
fn read_model_config(
    directory: &Path,
    transformers: TransformersVersion,
) -> Result<ModelConfigFile, LoadError> {
    find_file(directory, MODEL_CONFIG_NAME)
        .filter(|_| transformers == TransformersVersion::V5)
        .as_deref()
        .map(read_json)
        .transpose()
        .map(Option::unwrap_or_default)
}

/// Reads `tokenizer_config.json`. Without one, the path is that of the tokenizer.
fn read_tokenizer_config(
    config: &Config,
    directory: &Path,
) -> Result<(PathBuf, Map<String, Value>), LoadError> {
    let path = config
        .tokenizer_config
        .clone()
        .or_else(|| find_file(directory, "tokenizer_config.json"));
    let content = path.as_deref().map(read_json).transpose()?;
    let path = path.unwrap_or_else(|| config.tokenizer.clone());
    Ok((path, content.unwrap_or_default()))
}

pub(super) fn load(
    config: &Config,
    traits: &ModelTraits,
    fast_path: FastPath,
) -> Result<ModelFiles, LoadError> {
    let bytes = read_file(&config.tokenizer)?;
    let directory = config.tokenizer.parent().unwrap_or(Path::new(""));
    check_tokenizer_file(&config.tokenizer, &bytes)?;
    let (config_path, raw_config) = read_tokenizer_config(config, directory)?;
    let config_directory = config_path.parent().unwrap_or(Path::new("")).to_owned();
    let content = |problem: String| LoadError::content(&config_path, problem);
    let settings: TokenizerConfig =
        TokenizerConfig::deserialize(&raw_config).map_err(|error| content(error.to_string()))?;
    let raw_config = with_special_tokens_map(raw_config, &config_directory)?;

    let model = read_model_config(&config_directory, traits.transformers)?;
    let named = settings
        .tokenizer_class
        .as_deref()
        .or(model.tokenizer_class.as_deref());
    let metadata = TokenizerMetadata {
        configured_class: traits.tokenizer_class.as_deref(),
        class: named,
        model_type: model.model_type.as_deref(),
        legacy: settings.legacy,
        add_prefix_space: settings.add_prefix_space,
        unk_token: raw_config.get("unk_token").and_then(token_text),
        engine: traits.engine,
        transformers: traits.transformers,
    };
    settings.check_custom_code(&metadata).map_err(content)?;
    let class = metadata.resolve_class().map_err(content)?;
    let source = TokenizerSource {
        path: &config.tokenizer,
        bytes: &bytes,
        settings: &raw_config,
        class,
        metadata: &metadata,
        encodes_special_tokens: settings.split_special_tokens.unwrap_or(false),
    };
    let tokenizer = source.load(fast_path)?;
    check_added_tokens(tokenizer.library(), &raw_config, &config_path)?;
    let special_tokens = special_tokens(class, &raw_config);
    let special_tokens_mismatch = find_special_tokens_mismatch(
        tokenizer.library(),
        &settings,
        &special_tokens,
        traits.engine,
    );
    let templates = read_templates(
        config,
        traits.engine,
        settings.chat_template,
        &config_path,
        &config_directory,
    )?;
    Ok(ModelFiles {
        tokenizer,
        templates,
        special_tokens,
        special_tokens_mismatch,
    })
}

impl TokenizerConfig {
    /// Rejects tokenizers that run the model's own code.
    fn check_custom_code(&self, metadata: &TokenizerMetadata<'_>) -> Result<(), String> {
        let of_tokenizer = |map: &Value| {
            map.is_array() || map.get("AutoTokenizer").is_some_and(|code| !code.is_null())
        };
        let requested = metadata.configured_class.is_none() && !metadata.is_as_written();
        if requested && self.auto_map.as_ref().is_some_and(of_tokenizer) {
            return Err(
                "the tokenizer is custom code of the model (auto_map), which engines run \
                with --trust-remote-code: set their class as `tokenizer_class` of the model \
                (TokenizersBackend: tokenizer.json unchanged)"
                    .to_owned(),
            );
        }
        match self.fix_mistral_regex {
            Some(true) => Err("fix_mistral_regex is not supported".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Rejects a file that is not a `tokenizer.json` and suggests the file that was probably meant.
fn check_tokenizer_file(path: &Path, bytes: &[u8]) -> Result<(), LoadError> {
    #[derive(Deserialize)]
    struct TokenizerShape {
        model: Option<serde::de::IgnoredAny>,
    }
    let problem = if bytes.is_empty() {
        "the file is empty; copy it again".to_owned()
    } else if bytes.starts_with(b"version https://git-lfs") {
        "the file is a git-lfs pointer; run `git lfs pull`".to_owned()
    } else if let Ok(TokenizerShape { model: None }) = serde_json::from_slice(bytes) {
        let meant = path
            .parent()
            .and_then(|directory| find_file(directory, "tokenizer.json"))
            .filter(|meant| meant != path);
        let hint = meant.map_or(String::new(), |meant| {
            format!("; did you mean {}?", meant.display())
        });
        format!("the file is not a tokenizer.json: it has no `model`{hint}")
    } else {
        return Ok(());
    };
    Err(LoadError::content(path, problem))
}

/// Adds the special tokens of `special_tokens_map.json`, an older file that transformers reads if
/// no added tokens are listed.
fn with_special_tokens_map(
    mut written: Map<String, Value>,
    directory: &Path,
) -> Result<Map<String, Value>, LoadError> {
    if written.contains_key("added_tokens_decoder") {
        return Ok(written);
    }
    let map: Map<String, Value> = find_file(directory, "special_tokens_map.json")
        .as_deref()
        .map(read_json)
        .transpose()?
        .unwrap_or_default();
    for (key, mut value) in map {
        if value.get("content").is_some() {
            value["special"] = Value::Bool(true);
        }
        written.insert(key, value);
    }
    Ok(written)
}

/// Rejects configured added tokens that the tokenizer lacks, because the order in which the engine
/// adds them is unknown.
fn check_added_tokens(
    tokenizer: &Tokenizer,
    written: &Map<String, Value>,
    path: &Path,
) -> Result<(), LoadError> {
    let listed = written
        .get("added_tokens_decoder")
        .and_then(Value::as_object);
    for (id, token) in listed.into_iter().flatten() {
        let Some(content) = token.get("content").and_then(Value::as_str) else {
            continue;
        };
        if tokenizer
            .token_to_id(content)
            .map(|known| known.to_string())
            .as_deref()
            != Some(id.as_str())
        {
            let problem = format!("added token {id} `{content}` is not the same in the tokenizer");
            return Err(LoadError::content(path, problem));
        }
    }
    Ok(())
}

/// Returns the special tokens in the form that templates receive.
fn special_tokens(
    class: TokenizerClass,
    written: &Map<String, Value>,
) -> Vec<(&'static str, String)> {
    let by_default = |name: &str| {
        class
            .special_tokens()
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, token)| *token)
    };
    let token = |name: &'static str| {
        let text = match written.get(name) {
            Some(token) => token_text(token),
            None => by_default(name),
        };
        Some((name, text?.to_owned()))
    };
    SPECIAL_TOKENS.into_iter().filter_map(token).collect()
}

fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// Detects a BOS or EOS token that the configuration requests but `tokenizer.json` does not add, or
/// the reverse.
fn find_special_tokens_mismatch(
    tokenizer: &Tokenizer,
    settings: &TokenizerConfig,
    special: &[(&'static str, String)],
    engine: EngineKind,
) -> Option<String> {
    let added = tokenizer.encode_fast("", true).ok()?;
    let check = |requested: Option<bool>, name: &str, setting: &str| {
        let requested = requested?;
        let token = special
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, token)| token)?;
        let adds = tokenizer
            .token_to_id(token)
            .is_some_and(|id| added.get_ids().contains(&id));
        (requested != adds).then(|| {
            format!("{setting} is {requested}, but the tokenizer's post-processor says otherwise")
        })
    };
    // For these classes, SGLang restores settings that transformers 5 drops. Absent settings count
    // as true.
    let class = settings
        .tokenizer_class
        .as_deref()
        .map(|class| class.trim_end_matches("Fast"));
    let restored = [
        "LlamaTokenizer",
        "CodeLlamaTokenizer",
        "GemmaTokenizer",
        "CohereTokenizer",
    ];
    let by_default = (engine == EngineKind::Sglang
        && class.is_some_and(|class| restored.contains(&class)))
    .then_some(true);
    check(
        settings.add_bos_token.or(by_default),
        "bos_token",
        "add_bos_token",
    )
    .or_else(|| check(settings.add_eos_token, "eos_token", "add_eos_token"))
}

/// Reads the chat templates in order of precedence: the operator's, `chat_template.jinja`, the
/// configuration's.
fn read_templates(
    config: &Config,
    engine: EngineKind,
    configured: Option<ChatTemplateField>,
    config_path: &Path,
    directory: &Path,
) -> Result<Option<TemplateSources>, LoadError> {
    let file = config
        .chat_template
        .clone()
        .or_else(|| find_file(directory, "chat_template.jinja"));
    if let Some(path) = file {
        let source = String::from_utf8(read_file(&path)?)
            .map_err(|error| LoadError::content(&path, error.to_string()))?;
        // SGLang converts the file of an operator.
        let is_converted = engine == EngineKind::Sglang && config.chat_template.is_some();
        let source = if is_converted {
            source.trim_matches('\n').replace("\\n", "\n")
        } else {
            source
        };
        return Ok(Some(TemplateSources {
            path,
            named: vec![("default".to_owned(), source)],
        }));
    }
    let named = match configured {
        None => return Ok(None),
        Some(ChatTemplateField::One(source)) => vec![("default".to_owned(), source)],
        Some(ChatTemplateField::Named(list)) => list
            .into_iter()
            .map(|named| (named.name, named.template))
            .collect(),
    };
    Ok(Some(TemplateSources {
        path: config_path.to_owned(),
        named,
    }))
}

/// Returns a file in the directory, plain or compressed.
fn find_file(directory: &Path, name: &str) -> Option<PathBuf> {
    [name.to_owned(), format!("{name}.gz")]
        .into_iter()
        .map(|name| directory.join(name))
        .find(|path| path.is_file())
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    serde_json::from_slice(&read_file(path)?)
        .map_err(|error| LoadError::content(path, error.to_string()))
}

fn read_file(path: &Path) -> Result<Vec<u8>, LoadError> {
    let failed = |source| LoadError::Read {
        path: path.to_owned(),
        source,
    };
    let bytes = read_regular_file(path, MAX_MODEL_FILE).map_err(failed)?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    read_limited(GzDecoder::new(bytes.as_slice()), MAX_MODEL_FILE).map_err(failed)
}
