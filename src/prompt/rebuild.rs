//! Tokenizers as transformers 5 builds them. Of some classes it takes from `tokenizer.json` only vocabulary, merges, special
//! tokens and post-processor, and puts its own normalizer and pre-tokenizer around them, whatever the file says; vLLM of
//! 2026 runs with it. Which class it takes depends on the class that the files name and on the type of the model; both lists
//! are in `rebuild/transformers.json`, made by `tests/data/tokens/make_classes.py`. What is not known is refused by name.

mod added;
mod table;

use serde_json::{Value, json};

use super::{Engine, Transformers};
pub(super) use added::Added;
use table::{Does, TABLE};

/// The class of a tokenizer, as far as it decides how text is taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// What `tokenizer.json` says.
    AsWritten,
    Llama,
    Qwen2,
    Qwen3_5,
    Gemma,
    Gpt2,
    GptNeoX,
    Cohere,
}

/// What the other files of the model, and the operator, say of its tokenizer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said<'s> {
    /// The class that the engine has, where the operator says it.
    pub(super) told: Option<&'s str>,
    /// The class that the files name.
    pub(super) class: Option<&'s str>,
    /// The type of the model, where its `config.json` is at hand.
    pub(super) model_type: Option<&'s str>,
    pub(super) legacy: Option<bool>,
    pub(super) add_prefix_space: Option<bool>,
    pub(super) unk_token: Option<&'s str>,
    pub(super) engine: Engine,
    pub(super) transformers: Transformers,
}

/// How Qwen2 takes text apart, in the parts between which Qwen3.5 differs.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Said<'_> {
    /// The class that the engine comes to; or why that is not known.
    pub(super) fn class(&self) -> Result<Class, String> {
        if let Some(told) = self.told {
            return Class::told(told);
        }
        if self.transformers == Transformers::V4 {
            return Ok(Class::AsWritten);
        }
        let table = &*TABLE;
        let Some(model_type) = self.model_type else {
            return match self.class.map(Class::named) {
                // Of vocabularies of bytes not even this is so for every type: see `sure`.
                Some(Ok(Class::AsWritten)) => Ok(Class::AsWritten),
                _ => Err(self.of_no_type()),
            };
        };
        let chosen = match table.chosen(model_type, self.class) {
            // SGLang loads anew by the named class what came out as written.
            None if self.engine == Engine::Sglang => self.class,
            chosen => chosen,
        };
        chosen.map_or(Ok(Class::AsWritten), Class::named)
    }

    /// Whether nobody says what decides: some types have their own class whatever the files name.
    pub(super) fn is_of_any_type(&self) -> bool {
        self.told.is_none() && self.model_type.is_none() && self.transformers == Transformers::V5
    }

    /// Whether this file is as written whatever the type is: the classes that are taken in spite of the name are for
    /// vocabularies of bytes.
    pub(super) fn sure(&self, tokenizer: &Value) -> Result<(), String> {
        let sure = !is_of_pairs(tokenizer) || !is_of_bytes(&tokenizer["pre_tokenizer"]);
        if sure { Ok(()) } else { Err(self.of_no_type()) }
    }

    fn of_no_type(&self) -> String {
        let what = self
            .class
            .map_or("a tokenizer without a class".to_owned(), |class| {
                format!("the class `{class}`")
            });
        format!(
            "how the engine builds {what} depends on the type of the model, which config.json gives: copy the model's config.json \
             beside the tokenizer's files, or set `tokenizer_class` of the model (TokenizersBackend: tokenizer.json as it is)"
        )
    }

    /// Whether vLLM takes the tokenizer as written before it looks at anything else.
    pub(super) fn is_as_written(&self) -> bool {
        self.engine == Engine::Vllm
            && self
                .model_type
                .is_some_and(|model_type| TABLE.as_written(model_type))
    }
}

impl Class {
    /// The operator's word, which may be as vLLM calls its classes; unlike the name in a file it is not passed over where
    /// nobody knows it.
    fn told(name: &str) -> Result<Self, String> {
        let name = name.strip_prefix("Cached").unwrap_or(name);
        if !TABLE.knows(name.strip_suffix("Fast").unwrap_or(name)) {
            return Err(format!(
                "`tokenizer_class: {name}` is no class of transformers: write `type(tokenizer).__name__` of the engines' \
                 tokenizer, or TokenizersBackend if they take tokenizer.json as it is"
            ));
        }
        Self::named(name)
    }

    fn named(name: &str) -> Result<Self, String> {
        let bare = name.strip_suffix("Fast").unwrap_or(name);
        Ok(match TABLE.does(bare) {
            Does::AsWritten => Self::AsWritten,
            Does::Rebuilds("LlamaTokenizer") => Self::Llama,
            Does::Rebuilds("Qwen2Tokenizer") => Self::Qwen2,
            Does::Rebuilds("Qwen3_5Tokenizer") => Self::Qwen3_5,
            Does::Rebuilds("GemmaTokenizer") => Self::Gemma,
            Does::Rebuilds("GPT2Tokenizer") => Self::Gpt2,
            Does::Rebuilds("GPTNeoXTokenizer") => Self::GptNeoX,
            Does::Rebuilds("CohereTokenizer") => Self::Cohere,
            Does::Rebuilds(_) | Does::Python => {
                return Err(format!(
                    "transformers builds `{bare}` in a way of its own that is not known here: leave the model without \
                     `tokenizer` (it goes by load then), or say `tokenizer_class: TokenizersBackend` if its engines take \
                     tokenizer.json as it is"
                ));
            }
        })
    }

    /// The special tokens that it has where its configuration says nothing of them.
    pub(super) fn special_tokens(self) -> &'static [(&'static str, &'static str)] {
        const END: &str = "<|endoftext|>";
        match self {
            Self::AsWritten => &[],
            Self::Llama => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
            ],
            Self::Qwen2 | Self::Qwen3_5 => {
                &[("eos_token", END), ("unk_token", END), ("pad_token", END)]
            }
            Self::Gemma => &[
                ("bos_token", "<bos>"),
                ("eos_token", "<eos>"),
                ("unk_token", "<unk>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
            ],
            Self::Gpt2 => &[("bos_token", END), ("eos_token", END), ("unk_token", END)],
            Self::GptNeoX => &[
                ("bos_token", END),
                ("eos_token", END),
                ("unk_token", END),
                ("pad_token", "<|padding|>"),
            ],
            Self::Cohere => &[
                ("bos_token", "<BOS_TOKEN>"),
                ("eos_token", "<|END_OF_TURN_TOKEN|>"),
                ("unk_token", "<UNK>"),
                ("sep_token", "<SEP>"),
                ("pad_token", "<PAD>"),
                ("cls_token", "<CLS>"),
                ("mask_token", "<MASK_TOKEN>"),
            ],
        }
    }
}

/// What a class makes of `tokenizer.json`, beside vocabulary and merges.
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
    /// Whether unknown characters become bytes.
    bytes: bool,
    unk_token: Value,
}

/// Makes of the content of `tokenizer.json` what this class makes of it.
pub(super) fn rebuild(tokenizer: &mut Value, class: Class, said: &Said<'_>) -> Result<(), String> {
    let Some(parts) = parts(class, said) else {
        return Ok(());
    };
    if !is_of_pairs(tokenizer) {
        return Err(format!(
            "the engine's class {class:?} is for BPE, this is {}",
            tokenizer["model"]["type"]
        ));
    }
    let written = &tokenizer["pre_tokenizer"];
    // Spaces become ▁ in such a vocabulary, and a vocabulary of bytes has no ▁: no engine would run so for long.
    let sglang = said.engine == Engine::Sglang;
    if class == Class::Llama && said.told.is_none() && !sglang && is_of_bytes(written) {
        return Err(
            "the files name the class LlamaTokenizer, whose vocabulary is not one of bytes as this is: say what the \
                    engine has by `tokenizer_class` of the model (TokenizersBackend: tokenizer.json as it is)"
                .to_owned(),
        );
    }
    // SGLang puts the written one back where its type was changed.
    let kept = sglang && !written.is_null() && written["type"] != parts.pre_tokenizer["type"];
    if !kept {
        tokenizer["pre_tokenizer"] = parts.pre_tokenizer;
    }
    tokenizer["normalizer"] = parts.normalizer;
    // They come in again from the configuration, or as they were.
    tokenizer["added_tokens"] = json!([]);
    if class == Class::GptNeoX {
        tokenizer["post_processor"] = Value::Null;
    }
    let model = &mut tokenizer["model"];
    for (key, value) in [
        ("type", json!("BPE")),
        ("fuse_unk", json!(parts.bytes)),
        ("byte_fallback", json!(parts.bytes)),
        ("unk_token", parts.unk_token),
        ("ignore_merges", json!(false)),
        ("dropout", Value::Null),
        ("continuing_subword_prefix", Value::Null),
        ("end_of_word_suffix", Value::Null),
    ] {
        model[key] = value;
    }
    Ok(())
}

/// Whether pairs are merged.
fn is_of_pairs(tokenizer: &Value) -> bool {
    let model = &tokenizer["model"];
    model["type"] == "BPE" || (model["type"].is_null() && model["merges"].is_array())
}

/// Whether a pre-tokenizer makes bytes of text.
fn is_of_bytes(written: &Value) -> bool {
    let listed = written["pretokenizers"].as_array().into_iter().flatten();
    written["type"] == "ByteLevel" || listed.into_iter().any(|part| part["type"] == "ByteLevel")
}

/// What a class puts around the vocabulary; nothing for what is taken as written.
fn parts(class: Class, said: &Said<'_>) -> Option<Parts> {
    let nfc = json!({"type": "NFC"});
    let of_bytes = |normalizer, pre_tokenizer| {
        Some(Parts {
            normalizer,
            pre_tokenizer,
            bytes: false,
            unk_token: Value::Null,
        })
    };
    let prefix = said.add_prefix_space;
    match class {
        Class::AsWritten => None,
        Class::Llama => {
            let scheme = match (prefix.unwrap_or(true), said.legacy.unwrap_or(false)) {
                (false, _) => "never",
                (true, true) => "always",
                (true, false) => "first",
            };
            let spaces = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
            Some(Parts {
                normalizer: Value::Null,
                pre_tokenizer: spaces,
                bytes: true,
                unk_token: Value::Null,
            })
        }
        Class::Gemma => {
            let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
            let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
            let unk_token = json!(said.unk_token.unwrap_or("<unk>"));
            Some(Parts {
                normalizer: spaces,
                pre_tokenizer: split,
                bytes: true,
                unk_token,
            })
        }
        Class::Qwen2 => of_bytes(nfc, sequence([split_by(QWEN2), byte_level(prefix, false)])),
        Class::Qwen3_5 => of_bytes(
            nfc,
            sequence([split_by(QWEN3_5), byte_level(prefix, false)]),
        ),
        Class::Gpt2 => of_bytes(Value::Null, byte_level(prefix, true)),
        Class::GptNeoX => of_bytes(nfc, byte_level(prefix, true)),
        Class::Cohere => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            of_bytes(nfc, sequence([digits, byte_level(prefix, true)]))
        }
    }
}

fn split_by(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn byte_level(prefix: Option<bool>, use_regex: bool) -> Value {
    let prefix = prefix.unwrap_or(false);
    json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": use_regex})
}

fn sequence(parts: [Value; 2]) -> Value {
    json!({"type": "Sequence", "pretokenizers": Value::from_iter(parts)})
}

#[cfg(test)]
mod tests;
