//! Tests that the fast tokenizer equals the library for all texts and all tokenizer parts.

use std::io::Read;
use std::sync::LazyLock;

use flate2::read::GzDecoder;
use proptest::prelude::*;
use serde_json::{Value, json};
use warmroute_property_tests::{is_long_form, property_config};

use super::hard_texts::PIECES;
use super::*;

/// Patterns of tokenizers in use, by model.
pub(crate) const PATTERNS: [(&str, &[&str]); 9] = [
    ("gpt-2", &["gpt-2"]),
    (
        "llama-3",
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "qwen2",
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "qwen3.5",
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "cl100k",
        &[
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
    ),
    (
        "gpt-oss",
        &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "mistral",
        &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "deepseek-v3",
        &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^
\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[
]*|\s*[
]+|\s+(?!\S)|\s+"##,
        ],
    ),
    ("starcoder", &["digits", "gpt-2"]),
];

fn file(path: &str) -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path);
    let mut text = String::new();
    GzDecoder::new(std::fs::File::open(path).unwrap())
        .read_to_string(&mut text)
        .unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the content of Qwen's `tokenizer.json`.
pub(crate) fn qwen_file() -> Value {
    static QWEN: LazyLock<Value> =
        LazyLock::new(|| file("examples/models/qwen2.5/tokenizer.json.gz"));
    QWEN.clone()
}

/// Returns Qwen's tokenizer with changed parts.
pub(crate) fn with_parts(change: impl Fn(&mut Value)) -> Tokenizer {
    let mut written = qwen_file();
    change(&mut written);
    Tokenizer::from_bytes(serde_json::to_vec(&written).unwrap()).unwrap()
}

pub(crate) fn pre_tokenizer(patterns: &[&str]) -> Value {
    let part = |pattern: &&str| match *pattern {
        "digits" => json!({"type": "Digits", "individual_digits": true}),
        "gpt-2" => {
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true})
        }
        _ => {
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
        }
    };
    let mut parts: Vec<Value> = patterns.iter().map(part).collect();
    if patterns.last() == Some(&"gpt-2") {
        return json!({"type": "Sequence", "pretokenizers": parts});
    }
    parts.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}));
    json!({"type": "Sequence", "pretokenizers": parts})
}

/// Returns Qwen's tokenizer without changes.
pub(crate) fn qwen() -> Tokenizer {
    with_parts(|_| ())
}

/// Returns a tokenizer with another merge order.
pub(super) fn other_merges() -> Tokenizer {
    with_parts(|written| written["model"]["merges"].as_array_mut().unwrap().reverse())
}

type Pair = (Tokenizer, FastTokenizer);

fn pair(tokenizer: Tokenizer) -> Pair {
    let fast = FastTokenizer::new(&tokenizer).unwrap();
    (tokenizer, fast)
}

/// Returns one tokenizer of every supported kind.
fn all() -> &'static [(String, Pair)] {
    static ALL: LazyLock<Vec<(String, Pair)>> = LazyLock::new(|| {
        let mut all = vec![("qwen as it is".to_owned(), pair(qwen()))];
        // Building a tokenizer takes a second without optimization.
        let kinds = if is_long_form() { PATTERNS.len() } else { 2 };
        for (name, patterns) in PATTERNS.into_iter().take(kinds) {
            all.push((
                name.to_owned(),
                pair(with_parts(|written| {
                    written["pre_tokenizer"] = pre_tokenizer(patterns);
                    written["normalizer"] = Value::Null;
                    written["model"]["ignore_merges"] = (name == "llama-3").into();
                })),
            ));
        }
        all.push((
            "greedy tokens".to_owned(),
            pair(with_parts(|written| {
                let token = |id: u32, content: &str, left: bool, right: bool, normalized: bool| {
                    json!({"id": id, "content": content, "single_word": false, "lstrip": left, "rstrip": right,
                       "normalized": normalized, "special": false})
                };
                written["added_tokens"] = json!([
                    token(151643, "<a>", true, false, false),
                    token(151644, "<ab>", false, true, false),
                    token(151645, "<a>b", true, true, false),
                    token(151646, " \n", false, false, false),
                    token(151647, "e\u{301}", false, false, true),
                    token(151648, "<n>", true, true, true),
                ]);
            })),
        ));
        all
    });
    &ALL
}

fn assert_same(text: &str) {
    for (name, (tokenizer, fast)) in all() {
        let known = tokenizer.encode_fast(text, false).unwrap();
        if let Some(ids) = fast.ids(text) {
            assert_eq!(ids, known.get_ids(), "{name}: {text:?}");
        }
    }
}

#[test]
fn unsupported_tokenizer_has_no_fast_path() {
    let part = |path: &str, value: Value| {
        with_parts(|written| *written.pointer_mut(path).unwrap() = value.clone())
    };
    for (path, value) in [
        ("/model/dropout", json!(0.5)),
        ("/model/end_of_word_suffix", json!("</w>")),
    ] {
        assert!(FastTokenizer::new(&part(path, value)).is_err(), "{path}");
    }
}

#[test]
fn fast_tokens_match_with_letter_changing_normalizer() {
    let lower = with_parts(|written| written["normalizer"] = json!({"type": "Lowercase"}));
    let checked = VerifiedTokenizer::new(lower.clone());
    assert_eq!(checked.enable_fast_path(), Ok(()));
    for text in ["Some Words", "THE END", "x"] {
        assert_eq!(
            checked.ids(text).unwrap(),
            lower.encode_fast(text, false).unwrap().get_ids()
        );
    }
}

#[test]
fn fast_tokens_match_for_hard_pieces() {
    for piece in PIECES {
        assert_same(piece);
        assert_same(&piece.repeat(3));
        assert_same(&format!("{piece} {piece}\n{piece}"));
    }
    assert_same("");
    assert_same(&PIECES.concat());
    assert_same(&PIECES.join(" "));
    assert_same(&PIECES.iter().rev().copied().collect::<String>());
}

proptest! {
    #![proptest_config(property_config(32))]

    #[test]
    fn fast_tokens_match_for_random_hard_texts(
        pieces in prop::collection::vec(prop::sample::select(PIECES), 0..40),
    ) {
        assert_same(&pieces.concat());
    }

    #[test]
    fn fast_tokens_match_for_any_characters(text in ".{0,60}", more in any::<String>()) {
        assert_same(&text);
        assert_same(&more);
    }

    #[test]
    fn fast_tokens_match_for_few_letters(word in "[a-cA-B ]{0,200}", other in "(ab|a|er|re|ing){0,80}") {
        assert_same(&word);
        assert_same(&other);
    }

    #[test]
    fn fast_tokens_match_for_arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        assert_same(&String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn fast_tokens_match_for_long_words() {
    let mut number = 7_u32;
    let random: String = (0..3000)
        .map(|_| {
            number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            char::from(b'a' + (number >> 24) as u8 % 26)
        })
        .collect();
    let (tokenizer, fast) = &all()[0].1;
    for text in [
        "a".repeat(3000),
        " ".repeat(3000),
        "=".repeat(2000),
        "é中".repeat(900),
        random,
    ] {
        let text = format!("before it {text} and <|im_end|>after\n{text}");
        let known = tokenizer.encode_fast(text.as_str(), false).unwrap();
        assert_eq!(fast.ids(&text).as_deref(), Some(known.get_ids()));
    }
}

#[test]
fn contraction_with_long_s_disables_fast_path() {
    let (tokenizer, fast) = all().last().map(|(_, pair)| pair).unwrap();
    for text in ["a'\u{17f}'SThe", "a'\u{1e9b}'SThe"] {
        assert_eq!(fast.ids(text), None);
        let checked = VerifiedTokenizer::new(tokenizer.clone());
        assert_eq!(checked.enable_fast_path(), Ok(()));
        let known = tokenizer.encode_fast(text, false).unwrap();
        assert_eq!(checked.ids(text).unwrap(), known.get_ids());
    }
    for text in [
        "a's'SThe",
        "wa\u{17f} i\u{17f}t da\u{17f}",
        "' \u{17f}",
        "’\u{17f}",
    ] {
        assert_same(text);
        assert!(fast.ids(text).is_some(), "{text}");
    }
}

#[test]
fn replaced_apostrophe_disables_fast_path() {
    let quotes = with_parts(|written| {
        written["normalizer"] =
            json!({"type": "Replace", "pattern": {"String": "’"}, "content": "'"});
    });
    let fast = FastTokenizer::new(&quotes).unwrap();
    assert_eq!(fast.ids("a’\u{17f}"), None);
    assert!(fast.ids("a’s").is_some());
}

#[test]
fn hard_texts_use_fast_library() {
    for (name, (_, fast)) in all() {
        for text in hard_texts::hard_texts(&[]) {
            assert!(fast.ids(&text).is_some(), "{name}: {text:.60}");
        }
    }
}
