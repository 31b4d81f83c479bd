//! The files of a model: tokenizer, its configuration, special tokens and chat templates, read as transformers reads
//! them. Disagreement between the files is refused, because the engine would resolve it in ways of its own.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use thiserror::Error;
use tokenizers::Tokenizer;

use super::rebuild::{self, Added, Class, Said};
use super::{Config, Engine, MediaConfig, Traits, Transformers, sglang};

/// Why a model's files cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: std::io::Error,
    },
    /// A file says something else than it should.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A chat template that cannot be followed exactly.
    #[error("{}: chat template `{name}`: {problem}", path.display())]
    Template {
        /// The file it comes from.
        path: PathBuf,
        /// Its name.
        name: String,
        /// The unsupported feature or the mistake.
        problem: String,
    },
}

impl LoadError {
    /// The file at fault.
    pub fn path(&self) -> &Path {
        match self {
            Self::Read { path, .. } | Self::Content { path, .. } | Self::Template { path, .. } => {
                path
            }
        }
    }
}

/// The names under which special tokens reach a template.
pub(super) const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What the files hold.
pub(super) struct Loaded {
    pub tokenizer: Tokenizer,
    pub templates: Option<Sources>,
    pub special_tokens: Vec<(&'static str, String)>,
    /// Why it is uncertain which special tokens the engine adds.
    pub special_tokens_doubt: Option<String>,
}

/// Chat templates by name, and the file they come from.
pub(super) struct Sources {
    pub path: PathBuf,
    pub named: Vec<(String, String)>,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    chat_template: Option<ChatTemplate>,
    #[serde(default)]
    add_bos_token: Option<bool>,
    #[serde(default)]
    add_eos_token: Option<bool>,
    #[serde(default)]
    split_special_tokens: Option<bool>,
    #[serde(default)]
    tokenizer_class: Option<String>,
    #[serde(default)]
    legacy: Option<bool>,
    #[serde(default)]
    add_prefix_space: Option<bool>,
    #[serde(default)]
    auto_map: Option<Value>,
    #[serde(default)]
    fix_mistral_regex: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ChatTemplate {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

/// What the files of a model say, in short: two with the same make the same encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// With what the operator says of the model.
    pub fn with(self, traits: &Traits) -> Result<Self, LoadError> {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        // Only models whose prompts hold media need their name, and the others may share an encoder.
        let name = traits.media.as_ref().map(|_| traits.name.as_str());
        let (engine, class) = (traits.engine, &traits.tokenizer_class);
        hasher.update(
            format!(
                "{name:?} {engine:?} {:?} {class:?} {:?}",
                traits.transformers, traits.media
            )
            .as_bytes(),
        );
        for path in traits.media.iter().flat_map(MediaConfig::files) {
            let bytes = fs::read(path).map_err(|source| LoadError::Read {
                path: path.to_owned(),
                source,
            })?;
            hasher
                .update(&(bytes.len() as u64).to_le_bytes())
                .update(&bytes);
        }
        Ok(Self(hasher.finalize().into()))
    }
}

impl Config {
    /// What the files say now.
    pub fn fingerprint(&self) -> Result<Fingerprint, LoadError> {
        let folder = self.tokenizer.parent().unwrap_or(Path::new(""));
        let config = self
            .tokenizer_config
            .clone()
            .or_else(|| beside(folder, "tokenizer_config.json"));
        let config_folder = config.as_deref().and_then(Path::parent).unwrap_or(folder);
        let template = self
            .chat_template
            .clone()
            .or_else(|| beside(config_folder, "chat_template.jinja"));
        let special_tokens = beside(config_folder, "special_tokens_map.json");
        let model = beside(config_folder, MODEL);
        let mut hasher = blake3::Hasher::new();
        for file in [
            Some(self.tokenizer.clone()),
            config,
            template,
            special_tokens,
            model,
        ] {
            // An absent file is another thing than an empty one, and no file runs into the next.
            let Some(path) = file else {
                hasher.update(&[0]);
                continue;
            };
            let bytes = fs::read(&path).map_err(|source| LoadError::Read { path, source })?;
            hasher
                .update(&[1])
                .update(&(bytes.len() as u64).to_le_bytes())
                .update(&bytes);
        }
        Ok(Fingerprint(hasher.finalize().into()))
    }
}

/// What the model is, beside its tokenizer.
const MODEL: &str = "config.json";

#[derive(Default, Deserialize)]
struct ModelFile {
    #[serde(default)]
    model_type: Option<String>,
    #[serde(default)]
    tokenizer_class: Option<String>,
}

pub(super) fn load(config: &Config, traits: &Traits) -> Result<Loaded, LoadError> {
    let bytes = read(&config.tokenizer)?;
    let folder = config.tokenizer.parent().unwrap_or(Path::new(""));
    refuse_other_files(&config.tokenizer, &bytes)?;
    let config_path = config
        .tokenizer_config
        .clone()
        .or_else(|| beside(folder, "tokenizer_config.json"));
    let written: Map<String, Value> = config_path
        .as_deref()
        .map(json)
        .transpose()?
        .unwrap_or_default();
    let config_path = config_path.unwrap_or_else(|| config.tokenizer.clone());
    let config_folder = config_path.parent().unwrap_or(Path::new("")).to_owned();
    let content = |problem: String| LoadError::Content {
        path: config_path.clone(),
        problem,
    };
    let settings: TokenizerConfig =
        TokenizerConfig::deserialize(&written).map_err(|error| content(error.to_string()))?;
    let written = with_special_tokens_map(written, &config_folder)?;

    let model = beside(&config_folder, MODEL).filter(|_| traits.transformers == Transformers::V5);
    let model: ModelFile = model.as_deref().map(json).transpose()?.unwrap_or_default();
    let named = settings
        .tokenizer_class
        .as_deref()
        .or(model.tokenizer_class.as_deref());
    let said = Said {
        told: traits.tokenizer_class.as_deref(),
        class: named,
        model_type: model.model_type.as_deref(),
        legacy: settings.legacy,
        add_prefix_space: settings.add_prefix_space,
        unk_token: written.get("unk_token").and_then(text_of),
        engine: traits.engine,
        transformers: traits.transformers,
    };
    settings.refuse_code(&said).map_err(content)?;
    let class = said.class().map_err(content)?;
    let tokenizer = tokenizer(
        (&config.tokenizer, bytes),
        (&settings, &written),
        class,
        &said,
    )?;
    check_added_tokens(&tokenizer, &written, &config_path)?;
    let special_tokens = special_tokens(class, &written);
    let special_tokens_doubt =
        special_tokens_doubt(&tokenizer, &settings, &special_tokens, traits.engine);
    let templates = templates(
        (config, traits.engine),
        settings.chat_template,
        &config_path,
        &config_folder,
    )?;
    Ok(Loaded {
        tokenizer,
        templates,
        special_tokens,
        special_tokens_doubt,
    })
}

impl TokenizerConfig {
    /// What the engine does beyond its classes.
    fn refuse_code(&self, said: &Said<'_>) -> Result<(), String> {
        let of_tokenizer = |map: &Value| {
            map.is_array() || map.get("AutoTokenizer").is_some_and(|code| !code.is_null())
        };
        let asked = said.told.is_none() && !said.is_as_written();
        if asked && self.auto_map.as_ref().is_some_and(of_tokenizer) {
            return Err("the tokenizer is code of the model's own (auto_map), which engines run with --trust-remote-code: \
                        say what they have by `tokenizer_class` of the model (TokenizersBackend: tokenizer.json as it is)"
                .to_owned());
        }
        match self.fix_mistral_regex {
            Some(true) => Err("fix_mistral_regex is not known here".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Refuses a file that is no `tokenizer.json`, and names the file that was probably meant.
fn refuse_other_files(path: &Path, bytes: &[u8]) -> Result<(), LoadError> {
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
            .and_then(|folder| beside(folder, "tokenizer.json"))
            .filter(|meant| meant != path);
        let hint = meant.map_or(String::new(), |meant| {
            format!("; did you mean {}?", meant.display())
        });
        format!("the file is not a tokenizer.json: it has no `model`{hint}")
    } else {
        return Ok(());
    };
    Err(LoadError::Content {
        path: path.to_owned(),
        problem,
    })
}

/// The settings with the special tokens of the older file, which is read where no added tokens are listed.
fn with_special_tokens_map(
    mut written: Map<String, Value>,
    folder: &Path,
) -> Result<Map<String, Value>, LoadError> {
    if written.contains_key("added_tokens_decoder") {
        return Ok(written);
    }
    let map: Map<String, Value> = beside(folder, "special_tokens_map.json")
        .as_deref()
        .map(json)
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

fn tokenizer(
    (path, mut bytes): (&Path, Vec<u8>),
    (settings, written): (&TokenizerConfig, &Map<String, Value>),
    class: Class,
    said: &Said<'_>,
) -> Result<Tokenizer, LoadError> {
    let content = |error: tokenizers::Error| LoadError::Content {
        path: path.to_owned(),
        problem: error.to_string(),
    };
    // Read twice only where it is changed: it may have megabytes, and what is as written has its own added tokens.
    let parsed = |bytes: &[u8]| {
        serde_json::from_slice::<Value>(bytes).map_err(|error| content(error.into()))
    };
    if said.is_of_any_type() {
        said.sure(&parsed(&bytes)?)
            .map_err(|problem| content(problem.into()))?;
    }
    let added = if class == Class::AsWritten {
        Added::new(class, written, &Value::Null)
    } else {
        let mut whole = parsed(&bytes)?;
        let added = Added::new(class, written, &whole);
        rebuild::rebuild(&mut whole, class, said).map_err(|problem| content(problem.into()))?;
        bytes = serde_json::to_vec(&whole).map_err(|error| content(error.into()))?;
        added
    };
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(content)?;
    added.add_to(&mut tokenizer).map_err(content)?;
    tokenizer.with_truncation(None).map_err(content)?;
    tokenizer.with_padding(None);
    tokenizer.set_encode_special_tokens(settings.split_special_tokens.unwrap_or(false));
    Ok(tokenizer)
}

/// The engine adds tokens of the configuration that the tokenizer lacks, in an order of its own.
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
            return Err(LoadError::Content {
                path: path.to_owned(),
                problem,
            });
        }
    }
    Ok(())
}

/// The special tokens as templates see them.
fn special_tokens(class: Class, written: &Map<String, Value>) -> Vec<(&'static str, String)> {
    let by_default = |name: &str| {
        class
            .special_tokens()
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, token)| *token)
    };
    let token = |name: &'static str| {
        let text = match written.get(name) {
            Some(said) => text_of(said),
            None => by_default(name),
        };
        Some((name, text?.to_owned()))
    };
    SPECIAL_TOKENS.into_iter().filter_map(token).collect()
}

fn text_of(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// The configuration can ask for a BOS or EOS token that `tokenizer.json` does not add, or the reverse.
fn special_tokens_doubt(
    tokenizer: &Tokenizer,
    settings: &TokenizerConfig,
    special: &[(&'static str, String)],
    engine: Engine,
) -> Option<String> {
    let added = tokenizer.encode_fast("", true).ok()?;
    let check = |asked: Option<bool>, name: &str, setting: &str| {
        let asked = asked?;
        let token = special
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, token)| token)?;
        let adds = tokenizer
            .token_to_id(token)
            .is_some_and(|id| added.get_ids().contains(&id));
        (asked != adds).then(|| {
            format!("{setting} is {asked}, but the tokenizer's post-processor says otherwise")
        })
    };
    // SGLang restores what transformers 5 forgets of these classes, and takes it for asked where nothing is said.
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
    let by_default = (engine == Engine::Sglang
        && class.is_some_and(|class| restored.contains(&class)))
    .then_some(true);
    check(
        settings.add_bos_token.or(by_default),
        "bos_token",
        "add_bos_token",
    )
    .or_else(|| check(settings.add_eos_token, "eos_token", "add_eos_token"))
}

/// The chat templates in their order of precedence: the operator's, `chat_template.jinja`, the configuration's.
fn templates(
    (config, engine): (&Config, Engine),
    configured: Option<ChatTemplate>,
    config_path: &Path,
    folder: &Path,
) -> Result<Option<Sources>, LoadError> {
    let file = config
        .chat_template
        .clone()
        .or_else(|| beside(folder, "chat_template.jinja"));
    if let Some(path) = file {
        let source = String::from_utf8(read(&path)?).map_err(|error| LoadError::Content {
            path: path.clone(),
            problem: error.to_string(),
        })?;
        let given = engine == Engine::Sglang && config.chat_template.is_some();
        let source = if given {
            sglang::template_file(&source)
        } else {
            source
        };
        return Ok(Some(Sources {
            path,
            named: vec![("default".to_owned(), source)],
        }));
    }
    let named = match configured {
        None => return Ok(None),
        Some(ChatTemplate::One(source)) => vec![("default".to_owned(), source)],
        Some(ChatTemplate::Named(list)) => list
            .into_iter()
            .map(|named| (named.name, named.template))
            .collect(),
    };
    Ok(Some(Sources {
        path: config_path.to_owned(),
        named,
    }))
}

/// A file beside the others, plain or compressed.
fn beside(folder: &Path, name: &str) -> Option<PathBuf> {
    [name.to_owned(), format!("{name}.gz")]
        .into_iter()
        .map(|name| folder.join(name))
        .find(|path| path.is_file())
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    serde_json::from_slice(&read(path)?).map_err(|error| LoadError::Content {
        path: path.to_owned(),
        problem: error.to_string(),
    })
}

fn read(path: &Path) -> Result<Vec<u8>, LoadError> {
    let failed = |source| LoadError::Read {
        path: path.to_owned(),
        source,
    };
    let bytes = fs::read(path).map_err(failed)?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let mut plain = Vec::new();
    GzDecoder::new(bytes.as_slice())
        .read_to_end(&mut plain)
        .map_err(failed)?;
    Ok(plain)
}
