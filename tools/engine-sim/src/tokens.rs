//! Conversion between text and tokens. Prompts are tokenized by warmroute's encoder, which other
//! tests compare with vLLM. Answers consist of words of one token each, which stay the same tokens
//! when a client sends the text back. The next turn of a conversation therefore hits the generated
//! blocks, as it usually does with a real model.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde_json::json;
use warmroute_tokens::openai::{self, ApiKind};
use warmroute_tokens::prompt::{Config, Encoder};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const WORDS: &str = include_str!("words.txt");

/// Minimum number of words. With fewer words, answers to different prompts would be similar.
const MIN_WORDS: usize = 64;

/// Files of the served tokenizer.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TokenizerFiles {
    /// `tokenizer.json` or `tokenizer.json.gz` of the model.
    #[arg(long)]
    pub(crate) tokenizer: PathBuf,
    /// `tokenizer_config.json`; by default the file next to the tokenizer.
    #[arg(long)]
    pub(crate) tokenizer_config: Option<PathBuf>,
    /// A chat template that replaces the model's own.
    #[arg(long)]
    pub(crate) chat_template: Option<PathBuf>,
}

/// Tokens with their texts. Answers select tokens by index.
#[derive(Debug, Default)]
struct WordVocabulary {
    tokens: Vec<u32>,
    texts: HashMap<u32, String>,
}

/// The model's tokenizer and the vocabulary of its answers.
#[derive(Debug)]
pub(crate) struct SimTokenizer {
    encoder: Encoder,
    /// Words that begin an answer: capitalised, without a leading space.
    openings: WordVocabulary,
    /// Words that continue an answer.
    words: WordVocabulary,
}

impl SimTokenizer {
    pub(crate) fn load(files: &TokenizerFiles) -> anyhow::Result<Self> {
        let TokenizerFiles {
            tokenizer,
            tokenizer_config,
            chat_template,
        } = files.clone();
        let encoder = Encoder::load(&Config {
            tokenizer,
            tokenizer_config,
            chat_template,
        })
        .with_context(|| format!("cannot load {}", files.tokenizer.display()))?;
        let openings = vocabulary(&encoder, "x\n", WORDS.lines().map(capitalised))?;
        let words = vocabulary(
            &encoder,
            "The",
            WORDS.lines().map(|word| format!(" {word}")),
        )?;
        let least = openings.tokens.len().min(words.tokens.len());
        ensure!(
            least >= MIN_WORDS,
            "only {least} words are one token each in {}",
            files.tokenizer.display()
        );
        Ok(Self {
            encoder,
            openings,
            words,
        })
    }

    /// Returns the prompts of a request body, or a description of the problem.
    pub(crate) fn prompts(&self, api: ApiKind, body: &[u8]) -> Result<Vec<Vec<u32>>, String> {
        prompts(&self.encoder, api, body)
    }

    /// Returns the answer to `prompt`. It is always the same, but differs for another `choice`.
    pub(crate) fn answer(&self, prompt: &[u32], choice: usize, len: usize) -> Vec<u32> {
        let bytes: Vec<u8> = prompt
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        let seed = xxh3_64_with_seed(&bytes, choice as u64);
        let pick = |at: usize| {
            let tokens = if at == 0 {
                &self.openings.tokens
            } else {
                &self.words.tokens
            };
            let draw = xxh3_64_with_seed(&(at as u64).to_le_bytes(), seed);
            tokens[(draw % tokens.len() as u64) as usize]
        };
        (0..len).map(pick).collect()
    }

    /// Returns the text of an answer's token.
    pub(crate) fn text(&self, token: u32, is_first: bool) -> &str {
        let vocabulary = if is_first {
            &self.openings
        } else {
            &self.words
        };
        vocabulary.texts.get(&token).map_or("", String::as_str)
    }
}

fn prompts(encoder: &Encoder, api: ApiKind, body: &[u8]) -> Result<Vec<Vec<u32>>, String> {
    let request = openai::parse(api, body).map_err(|error| error.to_string())?;
    Ok(encoder
        .encode(&request)
        .map_err(|error| error.to_string())?
        .prompts)
}

fn capitalised(word: &str) -> String {
    word[..1].to_uppercase() + &word[1..]
}

/// Returns the `candidates` that add exactly one token after `before`.
fn vocabulary(
    encoder: &Encoder,
    before: &str,
    candidates: impl Iterator<Item = String>,
) -> anyhow::Result<WordVocabulary> {
    let candidates: Vec<String> = candidates.collect();
    let texts: Vec<_> = std::iter::once(before.to_owned())
        .chain(
            candidates
                .iter()
                .map(|candidate| format!("{before}{candidate}")),
        )
        .collect();
    let body = json!({"prompt": texts, "add_special_tokens": false}).to_string();
    let encoded =
        prompts(encoder, ApiKind::Completions, body.as_bytes()).map_err(anyhow::Error::msg)?;
    let (stem, encoded) = encoded
        .split_first()
        .context("the encoder returned no prompt")?;
    let mut vocabulary = WordVocabulary::default();
    for (text, tokens) in candidates.into_iter().zip(encoded) {
        if let Some(&[token]) = tokens.strip_prefix(stem.as_slice())
            && vocabulary.texts.insert(token, text).is_none()
        {
            vocabulary.tokens.push(token);
        }
    }
    Ok(vocabulary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> SimTokenizer {
        SimTokenizer::load(&TokenizerFiles {
            tokenizer: concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../examples/models/qwen2.5/tokenizer.json.gz"
            )
            .into(),
            tokenizer_config: None,
            chat_template: None,
        })
        .unwrap()
    }

    #[test]
    fn answers_are_stable_and_survive_next_turn() {
        let tokens = tokens();
        let request = json!({"messages": [{"role": "user", "content": "Hello!"}]});
        let prompt = tokens
            .prompts(ApiKind::ChatCompletions, request.to_string().as_bytes())
            .unwrap()
            .remove(0);
        let answer = tokens.answer(&prompt, 0, 200);
        assert_eq!(answer, tokens.answer(&prompt, 0, 200));
        assert_ne!(answer, tokens.answer(&prompt, 1, 200));
        assert_ne!(answer, tokens.answer(&prompt[1..], 0, 200));
        assert_eq!(answer[..50], tokens.answer(&prompt, 0, 50));
        let text: String = answer
            .iter()
            .enumerate()
            .map(|(at, &token)| tokens.text(token, at == 0))
            .collect();
        let next = json!({"messages": [
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Go on."},
        ]});
        let next = tokens
            .prompts(ApiKind::ChatCompletions, next.to_string().as_bytes())
            .unwrap()
            .remove(0);
        let known = [prompt, answer].concat();
        assert_eq!(
            next[..known.len()],
            known,
            "the conversation so far is a prefix of the next prompt"
        );
    }

    #[test]
    fn token_ids_pass_and_invalid_bodies_fail() {
        let tokens = tokens();
        let prompts = tokens
            .prompts(ApiKind::Completions, br#"{"prompt": [[1, 2], [3]]}"#)
            .unwrap();
        assert_eq!(prompts, [vec![1, 2], vec![3]]);
        assert!(
            tokens
                .prompts(ApiKind::Completions, b"{}")
                .unwrap_err()
                .contains("prompt")
        );
    }
}
