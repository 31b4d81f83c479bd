//! Captured requests, compared with the tokens of this encoder. The test reads every `*.json` and
//! `*.json.gz` of a directory that is a list of tokenization cases or a scenario.
//!
//! `WARMROUTE_TOKEN_CASES=DIR cargo test --test tokens` reads DIR instead of
//! `tests/data/tokens/engine`. A file `models.yaml` in the directory lists tokenizers by model
//! name.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::Value;
use warmroute_tokens::openai::{self, ApiKind, ChatPrompt, MediaSource, PromptInput};
use warmroute_tokens::prompt::media::{EngineModelName, ImageRule};
use warmroute_tokens::prompt::{
    Config, Encoder, MediaConfig, ModelTraits, MultimodalPrompt, TokenBudget,
};

/// Expected counts for each bundled file: all cases, equal cases, and cases that are not compared
/// because the engine or this encoder rejects them. The number of equal cases may only rise.
const EXPECTED_COUNTS: [(&str, [usize; 3]); 9] = [
    ("tokenization-cases-features.json.gz", [231, 186, 45]),
    ("tokenization-cases-messages-features.json.gz", [46, 38, 8]),
    ("tokenization-cases-messages-qwen2_5.json.gz", [46, 39, 7]),
    ("tokenization-cases-named.json.gz", [201, 168, 33]),
    ("tokenization-cases-qwen2_5.json.gz", [201, 168, 33]),
    ("tokenization-cases-qwen2vl.json.gz", [149, 109, 40]),
    ("tokenization-cases-responses-features.json.gz", [49, 42, 7]),
    ("tokenization-cases-responses-qwen2_5.json.gz", [49, 42, 7]),
    ("tokenization-cases-tinyllama.json.gz", [201, 168, 33]),
];

/// Context length of the captured engines (`--max-model-len`).
const MAX_MODEL_LEN: u64 = 16384;

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the directory is set by the environment"
)]
fn captured_files_of_directory_match() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/engine");
    let other = std::env::var_os("WARMROUTE_TOKEN_CASES").map(PathBuf::from);
    let directory = other.clone().unwrap_or(own);
    let mut models = TokenizerTable::of(&directory);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            [".json", ".json.gz"]
                .iter()
                .any(|end| file_name(path).ends_with(end))
        })
        .collect();
    files.sort();
    let mut report = format!("\ntokens: files of {}\n", directory.display());
    let mut compared = 0;
    let mut different = 0;
    let mut found = Vec::new();
    for file in &files {
        let tally = match serde_json::from_slice(&contents(file)) {
            Ok(json) => FileResult::of(file, &json, &mut models),
            Err(error) => FileResult::unread(format!("not read: {error}")),
        };
        compared += tally.equal;
        different += tally.different.len();
        found.push((
            file_name(file),
            [tally.cases, tally.equal, tally.skipped.len()],
        ));
        report += &tally.text(file_name(file));
    }
    // Written directly to the terminal, because captured output is shown only if a test fails.
    std::io::stderr().write_all(report.as_bytes()).unwrap();
    assert_eq!(
        different, 0,
        "tokens differ from the engine's; the cases are listed above"
    );
    assert!(compared > 0, "nothing was compared");
    if other.is_none() {
        assert_eq!(
            found, EXPECTED_COUNTS,
            "cases, equal ones, and those that are not compared"
        );
    }
}

fn file_name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// Returns the content of a file, decompressed if necessary.
pub(super) fn contents(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return bytes;
    }
    let mut plain = Vec::new();
    GzDecoder::new(bytes.as_slice())
        .read_to_end(&mut plain)
        .unwrap();
    plain
}

/// Results of one file.
#[derive(Default)]
struct FileResult {
    cases: usize,
    equal: usize,
    different: Vec<String>,
    skipped: Vec<String>,
}

enum RequestOutcome {
    Equal,
    Different(String),
    Skipped(String),
}

impl FileResult {
    fn unread(why: String) -> Self {
        Self {
            skipped: vec![why],
            ..Self::default()
        }
    }

    fn of(file: &Path, json: &Value, models: &mut TokenizerTable) -> Self {
        let name = file_name(file)
            .trim_end_matches(".gz")
            .trim_end_matches(".json");
        let mut tally = Self::default();
        match json {
            Value::Array(cases) => {
                let model = name.strip_prefix("tokenization-cases-").unwrap_or(name);
                for (at, case) in cases.iter().enumerate() {
                    let label = case["case"]
                        .as_str()
                        .map_or_else(|| format!("case {at}"), str::to_owned);
                    tally.add(
                        &label,
                        compare(&CapturedRequest::of_case(case), models, &[model]),
                    );
                }
            }
            Value::Object(scenario) => {
                let steps = scenario
                    .get("steps")
                    .and_then(Value::as_array)
                    .map_or(&[][..], Vec::as_slice);
                let served = |step: &Value| step["request"]["model"].as_str().map(str::to_owned);
                let mut names: Vec<String> = steps.iter().filter_map(served).collect();
                names.extend(
                    scenario
                        .get("instance")
                        .and_then(|one| one["model"].as_str())
                        .map(str::to_owned),
                );
                // Engines have topics of the form `kv@instance@model`.
                let messages = scenario
                    .get("zmq_messages")
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten();
                names.extend(messages.filter_map(|message| {
                    Some(message["topic"].as_str()?.rsplit('@').next()?.to_owned())
                }));
                for (at, step) in steps.iter().enumerate() {
                    // An adapter uses the tokenizer of its base model.
                    let model_names: Vec<&str> = step["request"]["model"]
                        .as_str()
                        .into_iter()
                        .chain(names.iter().map(String::as_str))
                        .collect();
                    tally.add(
                        &format!("step {at}"),
                        compare(&CapturedRequest::of_step(step), models, &model_names),
                    );
                }
                if steps.is_empty() {
                    tally.skipped.push("no steps".to_owned());
                }
            }
            _ => tally
                .skipped
                .push("neither cases nor a scenario".to_owned()),
        }
        tally
    }

    fn add(&mut self, label: &str, outcome: RequestOutcome) {
        self.cases += 1;
        match outcome {
            RequestOutcome::Equal => self.equal += 1,
            RequestOutcome::Different(how) => self.different.push(format!("{label}: {how}")),
            RequestOutcome::Skipped(why) => self.skipped.push(format!("{label}: {why}")),
        }
    }

    fn text(&self, file: &str) -> String {
        let different = self.different.len();
        let skipped = self.skipped.len();
        let mut text = format!(
            "{file}: {} cases, {} equal, {different} different, {skipped} skipped\n",
            self.cases, self.equal
        );
        text.extend(
            self.different
                .iter()
                .map(|line| format!("    DIFFERENT {line}\n")),
        );
        text.extend(
            self.skipped
                .iter()
                .map(|line| format!("    skipped {line}\n")),
        );
        text
    }
}

/// A request and the engine's result.
struct CapturedRequest<'j> {
    api: Option<ApiKind>,
    request: &'j Value,
    engine: EngineResult,
    /// Media ids of the engine by modality.
    items: Option<&'j serde_json::Map<String, Value>>,
}

enum EngineResult {
    /// Tokens of each prompt.
    Tokens(Vec<Vec<u32>>),
    /// Total number of tokens only.
    Count(usize),
    Refused,
    Silent,
}

impl<'j> CapturedRequest<'j> {
    fn of_case(case: &'j Value) -> Self {
        let request = &case["request"];
        // The engine's `/tokenize` ignores truncation, so the prompt that the engine used takes
        // precedence over it.
        let keys = [
            "chat_prompt_token_ids",
            "prompt_token_ids",
            "engine",
            "token_ids",
            "render",
        ];
        let answers: Vec<&Value> = keys
            .iter()
            .filter_map(|key| case.get(key))
            .filter(|value| !value.is_null())
            .collect();
        let reported = answers.iter().find_map(|answer| tokens_in(answer));
        let truncated = request["truncate_prompt_tokens"].is_number();
        let engine = match reported {
            Some(tokens) if !answers.first().is_some_and(|first| is_rejection(first)) => {
                EngineResult::Tokens(tokens)
            }
            _ if answers.iter().any(|answer| is_rejection(answer)) => EngineResult::Refused,
            _ => match tokens_in(&case["tokenize"]).filter(|_| !truncated) {
                Some(tokens) => EngineResult::Tokens(tokens),
                None => EngineResult::Silent,
            },
        };
        Self {
            api: api_of(case, request),
            request,
            engine,
            items: case["mm_hashes"].as_object(),
        }
    }

    fn of_step(step: &'j Value) -> Self {
        let request = &step["request"];
        let response = &step["response"];
        let choices = response["choices"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let prompts = request["n"].as_u64().map_or(1, |n| n.max(1)) as usize;
        let of_choices: Option<Vec<Vec<u32>>> = choices
            .iter()
            .step_by(prompts)
            .map(|choice| tokens_in(&choice["prompt_token_ids"])?.pop())
            .collect();
        let reported =
            tokens_in(&response["prompt_token_ids"]).or_else(|| tokens_in(&response["token_ids"]));
        let reported = reported.or(of_choices.filter(|lists| !lists.is_empty()));
        let count = response["usage"]["prompt_tokens"]
            .as_u64()
            .or_else(|| response["usage"]["input_tokens"].as_u64());
        let engine = match (reported, count) {
            _ if is_rejection(response) => EngineResult::Refused,
            (Some(tokens), _) => EngineResult::Tokens(tokens),
            (None, Some(count)) => EngineResult::Count(count as usize),
            (None, None) => EngineResult::Silent,
        };
        Self {
            api: api_of(step, request),
            request,
            engine,
            items: None,
        }
    }
}

fn api_of(holder: &Value, request: &Value) -> Option<ApiKind> {
    match holder["path"].as_str() {
        Some(path) => ApiKind::from_path(path.trim_end_matches("/render")),
        None if request.get("messages").is_some() => Some(ApiKind::ChatCompletions),
        None if request.get("prompt").is_some() => Some(ApiKind::Completions),
        None if request.get("input").is_some() => Some(ApiKind::Responses),
        None => None,
    }
}

fn is_rejection(answer: &Value) -> bool {
    let status = |key: &str| answer[key].as_u64().is_some_and(|status| status >= 400);
    answer.get("error").is_some_and(|error| !error.is_null())
        || ["HTTP", "status", "code"].iter().any(|key| status(key))
}

/// Returns the token lists of a response in any format.
fn tokens_in(value: &Value) -> Option<Vec<Vec<u32>>> {
    let ids = |list: &[Value]| -> Option<Vec<u32>> {
        list.iter()
            .map(|id| u32::try_from(id.as_u64()?).ok())
            .collect()
    };
    match value {
        Value::Array(list) if list.first().is_some_and(Value::is_array) => {
            list.iter().map(|entry| ids(entry.as_array()?)).collect()
        }
        Value::Array(list) if list.first().is_some_and(Value::is_object) => list
            .iter()
            .map(|entry| tokens_in(&entry["token_ids"])?.pop())
            .collect(),
        Value::Array(list) => Some(vec![ids(list)?]),
        Value::Object(map) => ["token_ids", "prompt_token_ids", "tokens"]
            .iter()
            .find_map(|key| tokens_in(map.get(*key)?)),
        _ => None,
    }
}

fn compare(
    captured: &CapturedRequest<'_>,
    models: &mut TokenizerTable,
    names: &[&str],
) -> RequestOutcome {
    let skipped = |why: String| RequestOutcome::Skipped(why);
    let Some(api) = captured.api else {
        return skipped("not a request with a prompt".to_owned());
    };
    let body = serde_json::to_vec(captured.request).unwrap();
    let mut request = match openai::parse(api, &body) {
        _ if matches!(captured.engine, EngineResult::Refused) => {
            return skipped("the engine refused it".to_owned());
        }
        _ if matches!(captured.engine, EngineResult::Silent) => {
            return skipped("the engine reported no tokens".to_owned());
        }
        Ok(request) => request,
        Err(error) => return skipped(format!("not read: {error}")),
    };
    request.resolve_truncation(MAX_MODEL_LEN);
    let ours = match (&request.prompt, models.find(names)) {
        // Token prompts need no tokenizer.
        (PromptInput::Tokens(_), Err(_)) => models.any().encode(&request),
        (_, Err(why)) => return skipped(why),
        (PromptInput::Chat(chat), Ok(encoder)) if chat.has_media() => {
            if models.reuses_id(chat) {
                return skipped("the engine has cached another item with this uuid".to_owned());
            }
            return match encoder.encode_multimodal(
                &request,
                None,
                &TokenBudget::UNLIMITED,
                &EngineModelName::Unreported,
            ) {
                Ok(ours) => against_multimodal(&ours, captured, models.names_media(names)),
                Err(error) => skipped(error.to_string()),
            };
        }
        (_, Ok(encoder)) => encoder.encode(&request),
    };
    match ours {
        Ok(ours) => against(&ours.prompts, &captured.engine),
        Err(error) => skipped(error.to_string()),
    }
}

fn against(ours: &[Vec<u32>], engine: &EngineResult) -> RequestOutcome {
    match engine {
        EngineResult::Tokens(engine) if ours == engine => RequestOutcome::Equal,
        EngineResult::Tokens(engine) => RequestOutcome::Different(difference(ours, engine)),
        EngineResult::Count(count) => match ours.iter().map(Vec::len).sum::<usize>() {
            ours if ours == *count => RequestOutcome::Equal,
            ours => RequestOutcome::Different(format!("{ours} tokens, the engine counted {count}")),
        },
        EngineResult::Refused | EngineResult::Silent => {
            RequestOutcome::Skipped("the engine reported no tokens".to_owned())
        }
    }
}

/// Compares a prompt that is known only up to an image. The known tokens must be right.
fn against_multimodal(
    ours: &MultimodalPrompt,
    captured: &CapturedRequest<'_>,
    named: bool,
) -> RequestOutcome {
    let known = ours.tokens.len();
    let engine = &captured.engine;
    if let (true, Some(items)) = (named, captured.items) {
        let mut theirs = items.clone();
        for item in &ours.items {
            let ids = theirs
                .get_mut(item.modality.as_str())
                .and_then(Value::as_array_mut);
            match ids.filter(|ids| !ids.is_empty()).map(|ids| ids.remove(0)) {
                Some(id) if id == item.id.as_str() => {}
                other => {
                    return RequestOutcome::Different(format!(
                        "an item has the id {}, but {other:?} in the engine",
                        item.id
                    ));
                }
            }
        }
    }
    match engine {
        _ if ours.is_complete => against(&[ours.tokens.to_vec()], engine),
        EngineResult::Tokens(lists) => match lists.as_slice() {
            [engine] if engine.starts_with(&ours.tokens) => RequestOutcome::Skipped(format!(
                "partial: the first {known} of {} tokens are known, and equal",
                engine.len()
            )),
            _ => RequestOutcome::Different(difference(&[ours.tokens.to_vec()], lists)),
        },
        _ => RequestOutcome::Skipped(format!("partial: the first {known} tokens are known")),
    }
}

fn difference(ours: &[Vec<u32>], engine: &[Vec<u32>]) -> String {
    if ours.len() != engine.len() {
        return format!("{} prompts, the engine had {}", ours.len(), engine.len());
    }
    let (at, (ours, engine)) = ours
        .iter()
        .zip(engine)
        .enumerate()
        .find(|(_, (ours, engine))| ours != engine)
        .unwrap();
    let same = ours
        .iter()
        .zip(engine)
        .take_while(|(ours, engine)| ours == engine)
        .count();
    let near = |ids: &[u32]| format!("{:?}", &ids[same.min(ids.len())..(same + 6).min(ids.len())]);
    format!(
        "prompt {at}: {} tokens, the engine has {}; from token {same} on {} and not {}",
        ours.len(),
        engine.len(),
        near(ours),
        near(engine)
    )
}

/// Entry of `models.yaml`.
#[derive(Deserialize)]
struct ModelEntry {
    name: String,
    tokenizer: PathBuf,
    #[serde(default)]
    config: Option<PathBuf>,
    #[serde(default)]
    chat_template: Option<PathBuf>,
    /// Media rules. The default is the `preprocessor_config.json` next to the configuration.
    #[serde(default, deserialize_with = "media_rules")]
    media: Option<MediaConfig>,
}

/// Parses the media rules of captured cases. The keys of this file format are stable and differ
/// from those of the configuration.
fn media_rules<'de, D: serde::Deserializer<'de>>(
    input: D,
) -> Result<Option<MediaConfig>, D::Error> {
    let Some(mut media) = Option::<Value>::deserialize(input)? else {
        return Ok(None);
    };
    let kinds = media.as_object_mut().into_iter().flatten();
    for rule in kinds.filter_map(|(_, value)| value.as_object_mut()) {
        rule.shift_remove("rule");
        if let Some(file) = rule.shift_remove("preprocessor") {
            rule.insert("preprocessor_config".to_owned(), file);
        }
        if let Some(tokens) = rule.shift_remove("tokens") {
            rule.insert("tokens_per_item".to_owned(), tokens);
        }
    }
    serde_json::from_value(media).map_err(serde::de::Error::custom)
}

/// Tokenizers by model name, loaded on first use.
struct TokenizerTable {
    entries: BTreeMap<String, (Config, Option<MediaConfig>)>,
    loaded: BTreeMap<String, Result<Arc<Encoder>, String>>,
    /// Media sources by the id that a client gave.
    named: BTreeMap<String, Option<MediaSource>>,
}

impl TokenizerTable {
    fn of(directory: &Path) -> Self {
        let mut entries = BTreeMap::new();
        let file = directory.join("models.yaml");
        if file.is_file() {
            let list: Vec<ModelEntry> =
                serde_saphyr::from_str(&std::fs::read_to_string(&file).unwrap())
                    .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            for entry in list {
                let tokenizer_config = entry.config.map(|config| directory.join(config));
                let chat_template = entry.chat_template.map(|template| directory.join(template));
                let config = Config {
                    tokenizer: directory.join(entry.tokenizer),
                    tokenizer_config,
                    chat_template,
                };
                let media = entry.media.map(|mut media: MediaConfig| {
                    let image = media.image.as_mut();
                    if let Some(file) = image.and_then(|image| image.preprocessor_config.as_mut()) {
                        *file = directory.join(&file);
                    }
                    media
                });
                entries.insert(entry.name, (config, media));
            }
        }
        Self {
            entries,
            loaded: BTreeMap::new(),
            named: BTreeMap::new(),
        }
    }

    /// Returns the tokenizer of the first of these names that has one, or the reason why none has.
    fn find(&mut self, names: &[&str]) -> Result<Arc<Encoder>, String> {
        let listed = names
            .iter()
            .find(|name| self.entries.contains_key(**name))
            .map(|name| (*name).to_owned());
        // A single model serves all names.
        let only = || {
            self.entries
                .keys()
                .next()
                .filter(|_| self.entries.len() == 1)
                .cloned()
        };
        let name = listed
            .or_else(|| {
                names
                    .iter()
                    .find_map(|name| bundled(name))
                    .map(str::to_owned)
            })
            .or_else(only);
        let name = name.ok_or_else(|| {
            format!(
                "no tokenizer for {}",
                names.first().unwrap_or(&"the request has no model")
            )
        })?;
        if let Some(known) = self.loaded.get(&name) {
            return known.clone();
        }
        let (config, media) = self
            .entries
            .get(&name)
            .cloned()
            .unwrap_or_else(|| bundled_files(&name));
        let media = media.or_else(|| media_beside(&config));
        let traits = ModelTraits {
            name: name.clone(),
            media,
            ..ModelTraits::default()
        };
        let loaded = Encoder::load_with_traits(&config, &traits).map(Arc::new);
        let loaded = loaded.map_err(|error| format!("the model {name} cannot be loaded: {error}"));
        self.loaded.insert(name, loaded.clone());
        loaded
    }

    /// Returns true if an item reuses the id of an earlier item with other content. The engine
    /// trusts the id.
    fn reuses_id(&mut self, chat: &ChatPrompt) -> bool {
        let mut another = false;
        for media in chat.media_items() {
            let Some(name) = &media.uuid else { continue };
            another |= self
                .named
                .entry(name.clone())
                .or_insert_with(|| media.source.clone())
                != &media.source;
        }
        another
    }

    /// Returns true if the engine's `--model` argument is known, on which its image ids depend.
    fn names_media(&self, names: &[&str]) -> bool {
        let entry = names.iter().find_map(|name| self.entries.get(*name));
        entry
            .and_then(|(_, media)| media.as_ref())
            .is_some_and(|media| media.model.is_some())
    }

    fn any(&mut self) -> Arc<Encoder> {
        self.find(&["tinyllama"]).unwrap()
    }
}

/// Returns the bundled tokenizer that a model of this name most likely uses.
fn bundled(name: &str) -> Option<&'static str> {
    let plain: String = name
        .to_lowercase()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
    [
        ("qwen2vl", "bundled qwen2-vl"),
        ("qwen", "bundled qwen2.5"),
        ("tinyllama", "bundled tinyllama"),
    ]
    .into_iter()
    .find_map(|(part, files)| plain.contains(part).then_some(files))
}

fn bundled_files(name: &str) -> (Config, Option<MediaConfig>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tokenizer = |model: &str| {
        root.join("examples/models")
            .join(model)
            .join("tokenizer.json.gz")
    };
    let of_vision = root.join("tests/data/tokens/qwen2-vl/tokenizer_config.json");
    let (tokenizer, tokenizer_config) = match name {
        "bundled qwen2-vl" => (tokenizer("qwen2.5"), Some(of_vision)),
        "bundled qwen2.5" => (tokenizer("qwen2.5"), None),
        _ => (tokenizer("tinyllama"), None),
    };
    (
        Config {
            tokenizer,
            tokenizer_config,
            chat_template: None,
        },
        None,
    )
}

/// Returns the media rules from the model's own file.
fn media_beside(config: &Config) -> Option<MediaConfig> {
    let preprocessor = config
        .tokenizer_config
        .as_ref()
        .unwrap_or(&config.tokenizer)
        .with_file_name("preprocessor_config.json");
    let json: Value = serde_json::from_slice(&std::fs::read(&preprocessor).ok()?).unwrap();
    let counts = json["image_processor_type"]
        .as_str()
        .is_some_and(|kind| kind.starts_with("Qwen2VLImageProcessor"));
    let image = ImageRule {
        token: "<|image_pad|>".to_owned(),
        placeholder: Some("<|vision_start|><|image_pad|><|vision_end|>".to_owned()),
        tokens_per_item: None,
        preprocessor_config: Some(preprocessor),
    };
    counts.then(|| MediaConfig {
        image: Some(image),
        ..MediaConfig::default()
    })
}
