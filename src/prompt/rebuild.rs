//! Tokenizers as transformers 5 builds them. Of some classes it takes from `tokenizer.json` only vocabulary, merges, special
//! tokens and post-processor, and puts its own normalizer and pre-tokenizer around them, whatever the file says; vLLM of
//! 2026 runs with it. Which class it takes depends on the class that `tokenizer_config.json` names and on the type of the
//! model (`models/auto/tokenization_auto.py` of 5.19).

use serde_json::{Value, json};

use super::Engine;

/// The class of a tokenizer, as far as it decides how text is taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// What `tokenizer.json` says.
    AsWritten,
    Llama,
    Qwen2,
    Gemma,
}

/// What the other files of the model say of its tokenizer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said<'s> {
    pub(super) class: Option<&'s str>,
    pub(super) model_type: Option<&'s str>,
    pub(super) legacy: Option<bool>,
    pub(super) add_prefix_space: Option<bool>,
    pub(super) engine: Engine,
}

/// Types of models whose tokenizers are taken as written unless the named class is the registered one.
const AS_WRITTEN: [&str; 51] = [
    "arctic",
    "aria",
    "chameleon",
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
    "hyperclovax",
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
    "olmo2",
    "olmo3",
    "phi3",
    "phi3_v",
    "phimoe",
    "pixtral",
    "step3p5",
];

/// How Qwen2 takes text apart.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Said<'_> {
    /// Whether anything but `tokenizer.json` has a say.
    pub(super) fn is_rebuilt(&self) -> bool {
        Class::of(self) != Class::AsWritten
    }
}

impl Class {
    fn of(said: &Said<'_>) -> Self {
        let named = said.class.map(|class| class.strip_suffix("Fast").unwrap_or(class));
        match (said.model_type, named) {
            // SGLang loads anew by the named class what came out as written.
            (Some(model), _) if AS_WRITTEN.contains(&model) && said.engine == Engine::Vllm => Self::AsWritten,
            // The only one of these whose files are not believed.
            (Some("qwen2"), Some(_)) => Self::Qwen2,
            (_, Some("LlamaTokenizer")) => Self::Llama,
            (_, Some("Qwen2Tokenizer")) => Self::Qwen2,
            (_, Some("GemmaTokenizer")) => Self::Gemma,
            _ => Self::AsWritten,
        }
    }
}

/// Makes of the content of `tokenizer.json` what the engine makes of it; whether that is something else.
pub(super) fn rebuild(tokenizer: &mut Value, said: &Said<'_>) -> bool {
    // Other kinds of models are built in other ways, of which nothing is known here.
    if tokenizer["model"]["type"] != "BPE" {
        return false;
    }
    let Some([normalizer, pre_tokenizer, fallback]) = parts(said) else { return false };
    // Where the model's family is not told, the file tells at least that it is none of those that the class is for: some
    // families name it although their vocabulary is one of bytes.
    if said.model_type.is_none() && Class::of(said) == Class::Llama && is_of_bytes(&tokenizer["pre_tokenizer"]) {
        return false;
    }
    // SGLang puts the written one back where its type was changed.
    let written = &tokenizer["pre_tokenizer"];
    let kept = said.engine == Engine::Sglang && !written.is_null() && written["type"] != pre_tokenizer["type"];
    let pre_tokenizer = if kept { written.clone() } else { pre_tokenizer };
    let mut changed = false;
    let mut set = |value: &mut Value, new: Value| {
        changed |= *value != new;
        *value = new;
    };
    set(&mut tokenizer["normalizer"], normalizer);
    set(&mut tokenizer["pre_tokenizer"], pre_tokenizer);
    let model = &mut tokenizer["model"];
    set(&mut model["fuse_unk"], fallback.clone());
    set(&mut model["byte_fallback"], fallback);
    set(&mut model["ignore_merges"], json!(false));
    set(&mut model["dropout"], Value::Null);
    changed
}

/// Whether a pre-tokenizer makes bytes of text.
fn is_of_bytes(written: &Value) -> bool {
    let listed = written["pretokenizers"].as_array().into_iter().flatten();
    written["type"] == "ByteLevel" || listed.into_iter().any(|part| part["type"] == "ByteLevel")
}

/// Normalizer and pre-tokenizer of a class, and whether unknown characters become bytes; nothing for what is taken as written.
fn parts(said: &Said<'_>) -> Option<[Value; 3]> {
    Some(match Class::of(said) {
        Class::AsWritten => return None,
        Class::Llama => {
            let scheme = match (said.add_prefix_space.unwrap_or(true), said.legacy.unwrap_or(false)) {
                (false, _) => "never",
                (true, true) => "always",
                (true, false) => "first",
            };
            let spaces = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
            [Value::Null, spaces, json!(true)]
        }
        Class::Qwen2 => {
            let prefix = said.add_prefix_space.unwrap_or(false);
            let split = json!({"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": false});
            let bytes =
                json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": false});
            [json!({"type": "NFC"}), json!({"type": "Sequence", "pretokenizers": [split, bytes]}), json!(false)]
        }
        Class::Gemma => {
            let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
            let split =
                json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
            [spaces, split, json!(true)]
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_is_chosen_as_transformers_chooses_it() {
        for (class, model_type, expected) in [
            (Some("LlamaTokenizer"), None, Class::Llama),
            (Some("LlamaTokenizerFast"), Some("llama"), Class::Llama),
            (Some("LlamaTokenizer"), Some("mistral"), Class::AsWritten),
            (Some("LlamaTokenizerFast"), Some("deepseek_v3"), Class::AsWritten),
            (Some("LlamaTokenizerFast"), Some("qwen2"), Class::Qwen2),
            (Some("Qwen2Tokenizer"), Some("qwen3"), Class::Qwen2),
            (Some("PreTrainedTokenizerFast"), Some("llama"), Class::AsWritten),
            (Some("GemmaTokenizerFast"), Some("gemma3"), Class::Gemma),
            (None, Some("llama"), Class::AsWritten),
        ] {
            let said = Said { class, model_type, ..Said::default() };
            assert_eq!(Class::of(&said), expected, "{class:?} {model_type:?}");
        }
    }
}
