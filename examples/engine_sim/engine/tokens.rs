//! Between text and tokens. Prompts are tokenised by warmroute's own encoder, which is checked elsewhere against vLLM's
//! ids. Answers are made of words that are one token each and stay the same tokens when a client sends the text back,
//! so that the next turn of a conversation finds the generated blocks, as it mostly does with a real model.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde_json::json;
use warmroute::openai::{self, Api};
use warmroute::prompt::{Config, Encoder};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const WORDS: &str = include_str!("words.txt");

/// Fewer would make answers of different prompts alike.
const LEAST_WORDS: usize = 64;

/// Which tokenizer the engine serves.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Files {
    /// `tokenizer.json` or `tokenizer.json.gz` of the model.
    #[arg(long)]
    pub(crate) tokenizer: PathBuf,
    /// `tokenizer_config.json`; by default the one beside the tokenizer.
    #[arg(long)]
    pub(crate) tokenizer_config: Option<PathBuf>,
    /// A chat template to use instead of the model's own.
    #[arg(long)]
    pub(crate) chat_template: Option<PathBuf>,
}

/// Tokens with their texts; the order is what answers choose from.
#[derive(Debug, Default)]
struct Vocabulary {
    tokens: Vec<u32>,
    texts: HashMap<u32, String>,
}

/// The model's tokenizer and the vocabulary of its answers.
#[derive(Debug)]
pub(crate) struct Tokens {
    encoder: Encoder,
    /// Words that begin an answer: capitalised, without a space.
    openings: Vocabulary,
    /// Words that continue one.
    words: Vocabulary,
}

impl Tokens {
    pub(crate) fn load(files: &Files) -> anyhow::Result<Self> {
        let Files {
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
            least >= LEAST_WORDS,
            "only {least} words are one token each in {}",
            files.tokenizer.display()
        );
        Ok(Self {
            encoder,
            openings,
            words,
        })
    }

    /// The prompts of a request body, or what is wrong with it.
    pub(crate) fn prompts(&self, api: Api, body: &[u8]) -> Result<Vec<Vec<u32>>, String> {
        prompts(&self.encoder, api, body)
    }

    /// What the model says to `prompt`: always the same, and different for another `choice`.
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

    /// The text of a token of an answer.
    pub(crate) fn text(&self, token: u32, is_first: bool) -> &str {
        let vocabulary = if is_first {
            &self.openings
        } else {
            &self.words
        };
        vocabulary.texts.get(&token).map_or("", String::as_str)
    }
}

fn prompts(encoder: &Encoder, api: Api, body: &[u8]) -> Result<Vec<Vec<u32>>, String> {
    let request = openai::parse(api, body).map_err(|error| error.to_string())?;
    Ok(encoder
        .encode(&request)
        .map_err(|error| error.to_string())?
        .prompts)
}

fn capitalised(word: &str) -> String {
    word[..1].to_uppercase() + &word[1..]
}

/// Those of `candidates` that are exactly one more token after `before`.
fn vocabulary(
    encoder: &Encoder,
    before: &str,
    candidates: impl Iterator<Item = String>,
) -> anyhow::Result<Vocabulary> {
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
        prompts(encoder, Api::Completions, body.as_bytes()).map_err(anyhow::Error::msg)?;
    let (stem, encoded) = encoded
        .split_first()
        .context("the encoder gives one list per prompt")?;
    let mut vocabulary = Vocabulary::default();
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

    fn tokens() -> Tokens {
        let tokenizer = "examples/models/qwen2.5/tokenizer.json.gz".into();
        Tokens::load(&Files {
            tokenizer,
            tokenizer_config: None,
            chat_template: None,
        })
        .unwrap()
    }

    #[test]
    fn answers_are_stable_differ_by_prompt_and_choice_and_survive_the_next_turn() {
        let tokens = tokens();
        let ask = json!({"messages": [{"role": "user", "content": "Hello!"}]});
        let prompt = tokens
            .prompts(Api::ChatCompletions, ask.to_string().as_bytes())
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
            .prompts(Api::ChatCompletions, next.to_string().as_bytes())
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
    fn token_ids_pass_as_they_are_and_nonsense_is_explained() {
        let tokens = tokens();
        let prompts = tokens
            .prompts(Api::Completions, br#"{"prompt": [[1, 2], [3]]}"#)
            .unwrap();
        assert_eq!(prompts, [vec![1, 2], vec![3]]);
        assert!(
            tokens
                .prompts(Api::Completions, b"{}")
                .unwrap_err()
                .contains("prompt")
        );
    }
}
