//! Small tokenizers with unusual added tokens, trained on documents of this repository. Some tokens
//! strip white space, require word boundaries, are normalized, or share prefixes. Some tokenizers
//! treat a piece differently depending on its position.

use std::path::Path;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::normalizers::{
    BertNormalizer, Lowercase, NFC, NFKC, Prepend, Replace, Sequence as Normalizers, Strip,
};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::processors::sequence::Sequence;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

const PAGES: [&str; 2] = [
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
];

/// Returns the contents of a tokenizer's added tokens.
pub(super) fn added_tokens(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).unwrap();
    let mut plain = Vec::new();
    if bytes.starts_with(&[0x1f, 0x8b]) {
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&*bytes), &mut plain).unwrap();
    } else {
        plain = bytes;
    }
    let tokenizer: serde_json::Value = serde_json::from_slice(&plain).unwrap();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let mut contents: Vec<_> = added
        .iter()
        .map(|token| token["content"].as_str().unwrap().to_owned())
        .collect();
    // Some tokenizers have hundreds of reserved tokens.
    contents.truncate(48);
    contents
}

/// Returns all tokenizers with their names.
pub(super) fn all() -> [(&'static str, Tokenizer); 4] {
    [
        ("byte-level", byte_level()),
        ("unigram", unigram()),
        ("prepended", prepended()),
        ("word pieces", word_pieces()),
    ]
}

fn lines() -> impl Iterator<Item = &'static str> + Send {
    PAGES.into_iter().flat_map(str::lines)
}

fn special(content: &str) -> AddedToken {
    AddedToken::from(content, true)
}

/// Returns added tokens of all variants that are matched in the raw text. Tokenization can resume
/// only after boundary tokens, which are matched in every context.
fn unusual_tokens() -> Vec<AddedToken> {
    vec![
        special("<s>"),
        special("</s>"),
        special("<|left|>").lstrip(true),
        special("<|right|>").rstrip(true),
        special("<|both|>").lstrip(true).rstrip(true),
        special("word").single_word(true),
        special("<single>").single_word(true),
        // `<e>` is no boundary token, because `<e>x` begins with it. `<e>x` is one.
        special("<e>"),
        special("<e>x"),
        // `<c>` and `<d>` are no boundary tokens either: `a<c>b` contains the one, and `q<d` ends
        // with a prefix of the other.
        special("<c>"),
        special("a<c>b"),
        special("<d>"),
        special("q<d"),
        // This token overlaps with itself.
        special("<a><a"),
        special("  <space>"),
        special("<line>\n"),
        special("<word>z"),
        special("\u{e9}"),
        AddedToken::from("<tool>", false).normalized(false),
        AddedToken::from("Router", false),
        AddedToken::from("isn't ", false).single_word(true),
        AddedToken::from("<n>", false).lstrip(true).rstrip(true),
    ]
}

fn template(single: &str, tokenizer: &Tokenizer) -> TemplateProcessing {
    let ids = ["<s>", "</s>"].map(|token| (token, tokenizer.token_to_id(token).unwrap()));
    TemplateProcessing::builder()
        .try_single(single)
        .unwrap()
        .special_tokens(ids.to_vec())
        .build()
        .unwrap()
}

/// Returns a tokenizer that adds a space before every piece and has two post-processors.
fn byte_level() -> Tokenizer {
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_normalizer(Some(NFC)).unwrap();
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(true, true, true)));
    let alphabet = ByteLevel::alphabet().into_iter().collect();
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(900)
        .initial_alphabet(alphabet)
        .build();
    tokenizer
        .train(&mut TrainerWrapper::from(trainer), lines())
        .unwrap();
    tokenizer.add_tokens(unusual_tokens()).unwrap();
    let processors = [
        PostProcessorWrapper::ByteLevel(ByteLevel::default()),
        PostProcessorWrapper::Template(template("<s> $A </s> <s>", &tokenizer)),
    ];
    tokenizer.with_post_processor(Some(Sequence::new(processors.to_vec())));
    tokenizer
}

/// Returns a tokenizer that adds a space before the first piece only, and joins spaces in its
/// normalizer.
fn unigram() -> Tokenizer {
    let mut tokenizer = Tokenizer::new(Unigram::default());
    let spaces = Replace::new(
        tokenizers::normalizers::replace::ReplacePattern::Regex(" {2,}".into()),
        " ",
    )
    .unwrap();
    tokenizer
        .with_normalizer(Some(Normalizers::new(vec![
            NFKC.into(),
            spaces.into(),
            Lowercase.into(),
        ])))
        .unwrap();
    tokenizer.with_pre_tokenizer(Some(Metaspace::new('\u{2581}', PrependScheme::First, true)));
    let trainer = UnigramTrainer::builder()
        .show_progress(false)
        .vocab_size(700)
        .unk_token(Some("<unk>".into()))
        .special_tokens(vec![special("<unk>")])
        .build()
        .unwrap();
    tokenizer
        .train(&mut TrainerWrapper::from(trainer), lines())
        .unwrap();
    tokenizer.add_tokens(unusual_tokens()).unwrap();
    let frame = template("$A </s>", &tokenizer);
    tokenizer.with_post_processor(Some(frame));
    tokenizer
}

/// Returns a tokenizer without a pre-tokenizer that strips white space from every piece and
/// prepends a mark.
fn prepended() -> Tokenizer {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let replace = Replace::new(" ", "\u{2581}").unwrap();
    let prepend = Prepend::new("\u{2581}".into());
    let normalizers = vec![
        Strip::new(true, false).into(),
        prepend.into(),
        replace.into(),
    ];
    tokenizer
        .with_normalizer(Some(Normalizers::new(normalizers)))
        .unwrap();
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(600)
        .max_token_length(Some(8))
        .build();
    tokenizer
        .train(
            &mut TrainerWrapper::from(trainer),
            lines().flat_map(str::split_whitespace),
        )
        .unwrap();
    tokenizer.add_tokens(unusual_tokens()).unwrap();
    tokenizer
}

fn word_pieces() -> Tokenizer {
    let mut tokenizer = Tokenizer::new(WordPiece::default());
    tokenizer
        .with_normalizer(Some(BertNormalizer::default()))
        .unwrap();
    tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
    let special_tokens = vec![special("[UNK]")];
    let trainer = WordPieceTrainer::builder()
        .show_progress(false)
        .vocab_size(800)
        .special_tokens(special_tokens)
        .build();
    tokenizer
        .train(&mut TrainerWrapper::from(trainer), lines())
        .unwrap();
    tokenizer.add_tokens(unusual_tokens()).unwrap();
    let frame = template("<s> $A", &tokenizer);
    tokenizer.with_post_processor(Some(frame));
    tokenizer
}
