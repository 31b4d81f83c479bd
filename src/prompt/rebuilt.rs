//! Tokenizers that the engine does not take from `tokenizer.json` as they stand there. Since version 5, transformers builds
//! those of some classes itself and takes from the file only vocabulary, merges, added tokens and post-processor
//! (`convert_to_native_format` of its `TokenizersBackend`). Of the classes in use with language models this makes a
//! difference for `LlamaTokenizer`: spaces at the beginning of a text and behind special tokens become other tokens.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::files::{LoadError, beside, json_of};

/// Families of models for which transformers 5 believes the file, whatever class it names: by its table of tokenizers, and
/// by its list of those whose class is known to be wrong.
const AS_WRITTEN: [&str; 66] = [
    "arctic",
    "aria",
    "chameleon",
    "chatlm",
    "deepseek_ocr",
    "deepseek_ocr2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "deepseek_vl_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "flex_olmo",
    "fuyu",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v",
    "glm4v_moe",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "h2ovl_chat",
    "hyperclovax",
    "hyperclovax_vlm",
    "internlm2",
    "jamba",
    "janus",
    "kimi_k25",
    "kimi_linear",
    "llava",
    "llava_next",
    "mimo_v2_flash",
    "minicpm3",
    "minicpmv",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "molmo",
    "molmo2",
    "nemotron",
    "nvfp4",
    "olmo2",
    "olmo3",
    "opencua",
    "openvla",
    "paddleocr_vl",
    "persimmon",
    "phi3",
    "phi3_v",
    "phimoe",
    "pixtral",
    "smolvlm",
    "stablelm",
    "step3_vl",
    "step3p5",
    "vipllava",
    "voxtral",
];

/// What of `tokenizer_config.json` decides how the tokenizer is built.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Class {
    #[serde(default)]
    tokenizer_class: Option<String>,
    #[serde(default)]
    legacy: Option<bool>,
    #[serde(default)]
    add_prefix_space: Option<bool>,
}

/// What of the model's own `config.json` does, where that lies beside it.
#[derive(Deserialize)]
struct ModelConfig {
    #[serde(default)]
    model_type: Option<String>,
}

impl Class {
    /// Where a space goes before the words of a text, if the engine builds the tokenizer itself.
    pub(super) fn prepend_scheme(&self, folder: &Path) -> Result<Option<&'static str>, LoadError> {
        let class = self.tokenizer_class.as_deref().unwrap_or_default();
        if class.strip_suffix("Fast").unwrap_or(class) != "LlamaTokenizer" {
            return Ok(None);
        }
        let config: Option<ModelConfig> = beside(folder, "config.json").as_deref().map(json_of).transpose()?;
        let family = config.and_then(|config| config.model_type);
        if family.is_some_and(|family| AS_WRITTEN.contains(&family.as_str())) {
            return Ok(None);
        }
        Ok(Some(match (self.add_prefix_space, self.legacy) {
            (Some(false), _) => "never",
            (_, Some(true)) => "always",
            _ => "first",
        }))
    }
}

/// The tokenizer as the engine builds it.
pub(super) fn rebuild(mut file: Map<String, Value>, prepend_scheme: &str) -> Map<String, Value> {
    file.insert("normalizer".to_owned(), Value::Null);
    let words = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": false});
    file.insert("pre_tokenizer".to_owned(), words);
    if let Some(Value::Object(model)) = file.get_mut("model") {
        let built = [
            ("dropout", Value::Null),
            ("unk_token", Value::Null),
            ("continuing_subword_prefix", Value::Null),
            ("end_of_word_suffix", Value::Null),
            ("fuse_unk", Value::Bool(true)),
            ("byte_fallback", Value::Bool(true)),
            ("ignore_merges", Value::Bool(false)),
        ];
        model.extend(built.map(|(key, value)| (key.to_owned(), value)));
    }
    file
}
