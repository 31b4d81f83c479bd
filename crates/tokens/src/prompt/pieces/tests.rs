use std::cell::Cell;
use std::sync::LazyLock;

use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::prompt::fast::hard_texts::PIECES;
use crate::prompt::fast::tests::{PATTERNS, pre_tokenizer, qwen, with_parts};

/// Returns one tokenizer of every kind that supports joints.
fn all() -> &'static [(&'static str, VerifiedTokenizer)] {
    static ALL: LazyLock<Vec<(&'static str, VerifiedTokenizer)>> = LazyLock::new(|| {
        let of = |patterns: &[&str]| {
            let tokenizer = with_parts(|written| {
                written["pre_tokenizer"] = pre_tokenizer(patterns);
                written["normalizer"] = if patterns.len() == 1 {
                    Value::Null
                } else {
                    written["normalizer"].clone()
                };
            });
            VerifiedTokenizer::new(tokenizer)
        };
        // The DeepSeek pattern in `PATTERNS` is written with other line endings.
        let kinds = PATTERNS.iter().filter(|(name, _)| *name != "deepseek-v3");
        let deepseek = [
            PASSING_PATTERNS[0],
            PASSING_PATTERNS[2],
            DIVIDING_PATTERNS[8],
        ];
        let mut all: Vec<_> = kinds
            .map(|(name, patterns)| (*name, of(patterns)))
            .collect();
        all.extend([
            ("deepseek-v3", of(&deepseek)),
            ("qwen as it is", VerifiedTokenizer::new(qwen())),
        ]);
        all
    });
    &ALL
}

fn budget(tokens: usize, step: usize, is_over: &dyn Fn() -> bool) -> TokenBudget<'_> {
    TokenBudget {
        max_tokens: tokens,
        is_expired: is_over,
        piece_bytes: step,
        max_piece_bytes: 400,
    }
}

#[test]
fn tokenizers_with_known_parts_have_joints() {
    for (name, tokenizer) in all() {
        assert!(tokenizer.has_joints(), "{name}");
    }
    let metaspace = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let prefixed = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    for part in [
        metaspace,
        prefixed,
        pre_tokenizer(&[r"\p{N}{1,3}"]),
        pre_tokenizer(&[r"(?<=a) b|\s+"]),
    ] {
        assert!(
            !supports_joints(&with_parts(
                |written| written["pre_tokenizer"] = part.clone()
            )),
            "{part}"
        );
    }
    let strips = with_parts(|written| written["normalizer"] = serde_json::json!({"type": "NFKD"}));
    assert!(!supports_joints(&strips));
}

#[test]
fn added_tokens_at_joints_are_detected() {
    let token = |content: &str| AddedToken {
        content: content.to_owned(),
        ..AddedToken::default()
    };
    for (content, touches) in [
        ("<|im_end|>", false),
        ("  ", false),
        ("a b", true),
        (" ", true),
        (" b", true),
        ("a ", true),
        ("\n\n", false),
    ] {
        assert_eq!(touches_joints(&token(content)), touches, "{content:?}");
    }
    assert!(touches_joints(&AddedToken {
        lstrip: true,
        ..token("word")
    }));
    assert!(touches_joints(&AddedToken {
        rstrip: true,
        ..token("<a>b")
    }));
}

#[test]
fn text_without_joints_stops_at_longest_piece() {
    let (_, tokenizer) = &all()[0];
    let never = || false;
    let budget = budget(usize::MAX, 50, &never);
    let stopped = |text: &str| tokenize_pieces(tokenizer, text, &budget).unwrap().stopped;
    assert_eq!(stopped(&"x".repeat(400)), None);
    assert_eq!(stopped(&"x".repeat(401)), Some(StopReason::TooLong));
    assert_eq!(stopped(&"word ".repeat(401)), None);
}

fn texts() -> impl Strategy<Value = String> {
    let words = prop_oneof![
        4 => prop::sample::select(PIECES).prop_map(str::to_owned),
        4 => "[a-zA-Z]{1,8}",
        3 => Just(" ".to_owned()),
        2 => "[一-十あ-おカ-ゴ]{1,4}[、。， ]?",
        1 => any::<String>(),
    ];
    prop::collection::vec(words, 0..60).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(property_config(64))]

    #[test]
    fn pieces_have_first_tokens_of_whole_text(
        text in texts(), step in 1..60usize, most in 1..200usize, looks in 0..12usize,
    ) {
        for (name, tokenizer) in all() {
            let whole = tokenizer.library().encode_fast(text.as_str(), false).unwrap();
            let whole = whole.get_ids();
            let looked = Cell::new(0);
            let is_over = || looked.replace(looked.get() + 1) >= looks;
            let found = tokenize_pieces(tokenizer, &text, &budget(most, step, &is_over)).unwrap();
            prop_assert!(whole.starts_with(&found.ids), "{name}: {:?} of {whole:?} for {text:?}", found.ids);
            prop_assert!(found.ids.len() <= most);
            prop_assert!(found.stopped.is_some() || found.ids == whole, "{name}: {text:?}");
            let joined = tokenize_pieces(tokenizer, &text, &budget(usize::MAX, step, &|| false)).unwrap();
            prop_assert!(joined.stopped.is_some() || joined.ids == whole, "{name}: {text:?}");
        }
    }
}
