//! Checks that the parts of a tokenizer depend only on their piece of text. Every variant is
//! listed, so that this module does not compile if the library adds one.

use serde_json::Value;
use tokenizers::normalizers::NormalizerWrapper as Normalizer;
use tokenizers::pre_tokenizers::PreTokenizerWrapper as PreTokenizer;
use tokenizers::processors::PostProcessorWrapper as Processor;
use tokenizers::{ModelWrapper as Model, Tokenizer};

/// Special tokens that the post-processor adds around a text.
pub(super) struct SpecialTokenFrame {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
}

impl SpecialTokenFrame {
    /// Returns the number of special tokens.
    pub(super) fn len(&self) -> usize {
        self.before.len() + self.after.len()
    }

    /// Returns the leading special tokens followed by `ids`.
    pub(super) fn prepend_to(&self, ids: &[u32]) -> Vec<u32> {
        [&self.before, ids].concat()
    }

    /// Returns `ids` with the special tokens before and after them.
    pub(super) fn surround(&self, ids: &[u32]) -> Vec<u32> {
        [&self.before, ids, &self.after].concat()
    }
}

/// Checks that normalizer, pre-tokenizer and model are deterministic functions of each piece. The
/// error is the reason.
pub(super) fn check_parts(tokenizer: &Tokenizer) -> Result<(), &'static str> {
    if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
        return Err("the tokenizer truncates or pads");
    }
    tokenizer
        .get_normalizer()
        .map_or(Ok(()), check_normalizer)?;
    tokenizer
        .get_pre_tokenizer()
        .map_or(Ok(()), check_pre_tokenizer)?;
    match tokenizer.get_model() {
        Model::BPE(model) if model.dropout.is_some_and(|dropout| dropout > 0.0) => {
            Err("the tokenizer uses BPE dropout")
        }
        Model::Unigram(model) if model.alpha.is_some() || model.nbest_size.is_some() => {
            Err("the tokenizer uses sampling")
        }
        Model::BPE(_) | Model::Unigram(_) | Model::WordPiece(_) | Model::WordLevel(_) => Ok(()),
    }
}

/// Checks a normalizer. All known ones are functions of their text.
fn check_normalizer(normalizer: &Normalizer) -> Result<(), &'static str> {
    match normalizer {
        Normalizer::Sequence(all) => all.as_ref().iter().try_for_each(self::check_normalizer),
        Normalizer::BertNormalizer(_)
        | Normalizer::StripNormalizer(_)
        | Normalizer::StripAccents(_)
        | Normalizer::NFC(_)
        | Normalizer::NFD(_)
        | Normalizer::NFKC(_)
        | Normalizer::NFKD(_)
        | Normalizer::Lowercase(_)
        | Normalizer::Nmt(_)
        | Normalizer::Precompiled(_)
        | Normalizer::Replace(_)
        | Normalizer::Prepend(_)
        | Normalizer::ByteLevel(_) => Ok(()),
    }
}

/// Checks a pre-tokenizer. `Metaspace` depends on whether a piece is the first of the text. The
/// other supported ones are functions of their piece.
fn check_pre_tokenizer(pre_tokenizer: &PreTokenizer) -> Result<(), &'static str> {
    match pre_tokenizer {
        PreTokenizer::Sequence(all) => all.as_ref().iter().try_for_each(self::check_pre_tokenizer),
        PreTokenizer::BertPreTokenizer(_)
        | PreTokenizer::ByteLevel(_)
        | PreTokenizer::Delimiter(_)
        | PreTokenizer::Metaspace(_)
        | PreTokenizer::Whitespace(_)
        | PreTokenizer::Split(_)
        | PreTokenizer::Punctuation(_)
        | PreTokenizer::WhitespaceSplit(_)
        | PreTokenizer::Digits(_)
        | PreTokenizer::FixedLength(_) => Ok(()),
        PreTokenizer::UnicodeScripts(_) => Err("the tokenizer splits by Unicode script"),
    }
}

/// Returns the special tokens that the post-processor adds, if they are fixed tokens before and
/// after the text. The error is the reason.
pub(super) fn find_frame(tokenizer: &Tokenizer) -> Result<SpecialTokenFrame, &'static str> {
    const UNKNOWN: &str = "the post-processor does more than add fixed tokens around the text";
    let frame = frame_of_processor(tokenizer.get_post_processor()).ok_or(UNKNOWN)?;
    for text in ["", "a", "two words"] {
        let ids = |special| {
            tokenizer
                .encode_fast(text, special)
                .map(|encoding| encoding.get_ids().to_vec())
        };
        let (Ok(bare), Ok(framed)) = (ids(false), ids(true)) else {
            return Err("the tokenizer fails on plain text");
        };
        if frame.surround(&bare) != framed {
            return Err(UNKNOWN);
        }
    }
    Ok(frame)
}

/// Returns the special tokens of the only template among the processors. Any other processor must
/// leave the tokens unchanged.
fn frame_of_processor(processor: Option<&Processor>) -> Option<SpecialTokenFrame> {
    let none = SpecialTokenFrame {
        before: Vec::new(),
        after: Vec::new(),
    };
    let Some(processor) = processor else {
        return Some(none);
    };
    let all = match processor {
        Processor::Sequence(all) => all.as_ref(),
        one => std::slice::from_ref(one),
    };
    let mut found = None;
    for processor in all {
        match processor {
            Processor::ByteLevel(_) => {}
            Processor::Template(template) if found.is_none() => {
                found = Some(frame_of_template(&serde_json::to_value(template).ok()?)?);
            }
            Processor::Template(_)
            | Processor::Sequence(_)
            | Processor::Bert(_)
            | Processor::Roberta(_) => {
                return None;
            }
        }
    }
    Some(found.unwrap_or(none))
}

fn frame_of_template(template: &Value) -> Option<SpecialTokenFrame> {
    let mut before = Vec::new();
    let mut after = Vec::new();
    let mut has_text = false;
    for piece in template["single"].as_array()? {
        if let Some(token) = piece.get("SpecialToken") {
            let ids = template["special_tokens"][token["id"].as_str()?]["ids"].as_array()?;
            let side = if has_text { &mut after } else { &mut before };
            for id in ids {
                side.push(u32::try_from(id.as_u64()?).ok()?);
            }
        } else if has_text || piece["Sequence"]["id"] != "A" {
            return None;
        } else {
            has_text = true;
        }
    }
    has_text.then_some(SpecialTokenFrame { before, after })
}
