//! Which parts of a tokenizer are known to see no further than their piece. Every kind is named, so that a new one in the
//! library is a decision here and not an accident.

use serde_json::Value;
use tokenizers::normalizers::NormalizerWrapper as Normalizer;
use tokenizers::pre_tokenizers::PreTokenizerWrapper as PreTokenizer;
use tokenizers::processors::PostProcessorWrapper as Processor;
use tokenizers::{ModelWrapper as Model, Tokenizer};

/// What the post-processor puts around a text.
pub(in crate::prompt) struct Frame {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
}

impl Frame {
    /// How many tokens it is made of.
    pub(in crate::prompt) fn len(&self) -> usize {
        self.before.len() + self.after.len()
    }

    /// The tokens with what comes before them.
    pub(in crate::prompt) fn before(&self, ids: &[u32]) -> Vec<u32> {
        [&self.before, ids].concat()
    }

    /// The tokens with it around them.
    pub(in crate::prompt) fn around(&self, ids: &[u32]) -> Vec<u32> {
        [&self.before, ids, &self.after].concat()
    }
}

/// Whether normalizer, pre-tokenizer and model work on each piece for itself and always alike; else the reason.
pub(in crate::prompt) fn parts(tokenizer: &Tokenizer) -> Result<(), &'static str> {
    if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
        return Err("it truncates or pads");
    }
    tokenizer.get_normalizer().map_or(Ok(()), normalizer)?;
    tokenizer
        .get_pre_tokenizer()
        .map_or(Ok(()), pre_tokenizer)?;
    match tokenizer.get_model() {
        Model::BPE(model) if model.dropout.is_some_and(|dropout| dropout > 0.0) => {
            Err("it drops merges by chance")
        }
        Model::Unigram(model) if model.alpha.is_some() || model.nbest_size.is_some() => {
            Err("it samples")
        }
        Model::BPE(_) | Model::Unigram(_) | Model::WordPiece(_) | Model::WordLevel(_) => Ok(()),
    }
}

/// All of them are functions of the text they are given.
fn normalizer(normalizer: &Normalizer) -> Result<(), &'static str> {
    match normalizer {
        Normalizer::Sequence(all) => all.as_ref().iter().try_for_each(self::normalizer),
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

/// `Metaspace` asks whether a piece is the first of the text; the others are functions of their piece.
fn pre_tokenizer(pre_tokenizer: &PreTokenizer) -> Result<(), &'static str> {
    match pre_tokenizer {
        PreTokenizer::Sequence(all) => all.as_ref().iter().try_for_each(self::pre_tokenizer),
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
        PreTokenizer::UnicodeScripts(_) => Err("it splits by scripts"),
    }
}

/// What the post-processor adds, where that is fixed tokens before and after; else the reason.
pub(in crate::prompt) fn frame(tokenizer: &Tokenizer) -> Result<Frame, &'static str> {
    const UNKNOWN: &str = "its post-processor does more than to put fixed tokens around a text";
    let frame = template(tokenizer.get_post_processor()).ok_or(UNKNOWN)?;
    for text in ["", "a", "two words"] {
        let ids = |special| {
            tokenizer
                .encode_fast(text, special)
                .map(|encoding| encoding.get_ids().to_vec())
        };
        let (Ok(bare), Ok(framed)) = (ids(false), ids(true)) else {
            return Err("it fails on plain words");
        };
        if frame.around(&bare) != framed {
            return Err(UNKNOWN);
        }
    }
    Ok(frame)
}

/// What the one template among the processors says; of the others, only those are known that leave the tokens alone.
fn template(processor: Option<&Processor>) -> Option<Frame> {
    let none = Frame {
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
                found = Some(pieces(&serde_json::to_value(template).ok()?)?);
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

fn pieces(template: &Value) -> Option<Frame> {
    let (mut before, mut after, mut text) = (Vec::new(), Vec::new(), false);
    for piece in template["single"].as_array()? {
        if let Some(token) = piece.get("SpecialToken") {
            let ids = template["special_tokens"][token["id"].as_str()?]["ids"].as_array()?;
            let side = if text { &mut after } else { &mut before };
            for id in ids {
                side.push(u32::try_from(id.as_u64()?).ok()?);
            }
        } else if text || piece["Sequence"]["id"] != "A" {
            return None;
        } else {
            text = true;
        }
    }
    text.then_some(Frame { before, after })
}
