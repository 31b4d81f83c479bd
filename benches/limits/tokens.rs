//! Tokenization of new documents, of the next turn of a chat, and of adversarial words.

use std::path::Path;

use bpe::byte_pair_encoding::{BytePairEncoding, find_hash_factor_for_dictionary};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use tokenizers::{ModelWrapper, Tokenizer};
use warmroute_core::block::{BlockWindows, CacheSalt};
use warmroute_core::worker::BlockSize;
use warmroute_tokens::openai::{self, ApiKind, ApiRequest};
use warmroute_tokens::prompt::{Encoder, PromptTokens};

use super::LimitRun;
use super::chats::{encoder, library};
use warmroute_testbed::comparison::{ComparedMeasure, measure_cpu};

/// Bytes of a document; some 32,000 tokens.
const DOCUMENT: usize = 128 << 10;
const MESSAGES: usize = 50;
const MESSAGE: usize = 2600;
const WORD: usize = 1 << 20;
const BLOCK: BlockSize = BlockSize(std::num::NonZeroU32::new(16).expect("16 is not zero"));

/// Maximum duration of the slowest adversarial text, in milliseconds.
const WORST: f64 = 50.0;
/// Maximum duration of a chat's next turn, in microseconds.
const TURN: f64 = 20.0;

pub(super) fn measure(run: &mut LimitRun) {
    let documents = documents();
    let library = library();
    first_time(run, &documents, &library);
    just_loaded(run, &documents, &library);
    next_turn(run, &documents);
    hostile(run);
}

/// Returns the texts of this repository, cut to documents of equal length, with prose and code in
/// turns.
fn documents() -> Vec<String> {
    let mut files = Vec::new();
    let mut directories = vec![Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory)
            .expect("the repository")
            .flatten()
        {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_dir() && !name.to_string_lossy().starts_with(['.', 't']) {
                directories.push(path);
            } else if path.extension().is_some_and(|kind| {
                ["rs", "md", "yaml", "json", "py"]
                    .iter()
                    .any(|extension| kind == *extension)
            }) {
                files.push(path);
            }
        }
    }
    files.sort_by_key(|path| {
        path.metadata()
            .map(|metadata| metadata.len() % 9973)
            .unwrap_or_default()
    });
    let all: String = files
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .collect();
    let mut rest = all.as_str();
    let mut documents = Vec::new();
    while rest.len() > DOCUMENT {
        let (document, next) = rest.split_at(rest.floor_char_boundary(DOCUMENT));
        documents.push(document.to_owned());
        rest = next;
    }
    documents
}

fn completion(text: &str) -> ApiRequest {
    let body = json!({"model": "m", "prompt": text}).to_string();
    openai::parse(ApiKind::Completions, body.as_bytes()).expect("a completion")
}

/// Returns the microseconds of tokenization, and the tokens.
fn tokenize(
    encoder: &Encoder,
    request: &ApiRequest,
    cache_namespace: Option<&str>,
) -> (f64, PromptTokens) {
    let rendered = encoder.render(request).expect("the template renders it");
    let mut tokens = Vec::new();
    let took = measure_cpu(|| {
        tokens = encoder
            .tokenize_cached(&rendered, cache_namespace)
            .expect("its tokens")
    });
    (took / 1e3, tokens.remove(0))
}

fn library_tokenizes(library: &Tokenizer, text: &str) -> (f64, Vec<u32>) {
    let mut tokens = Vec::new();
    let took = measure_cpu(|| {
        tokens = library
            .encode_fast(text, false)
            .expect("its tokens")
            .get_ids()
            .to_vec()
    });
    (took / 1e3, tokens)
}

/// Measures each document once. Both word caches are warm from previous documents.
fn first_time(run: &mut LimitRun, documents: &[String], library: &Tokenizer) {
    let name = "tokenize 32k tokens, first time seen";
    if !run.wants(name) {
        return;
    }
    let encoder = encoder(1 << 28);
    let (before, unseen) = documents.split_at(documents.len() / 2);
    for document in before {
        tokenize(&encoder, &completion(document), None);
        library_tokenizes(library, document);
    }
    let mut theirs = Vec::new();
    let mut ours = Vec::new();
    for document in unseen.iter().take(run.rounds) {
        let (took, known) = library_tokenizes(library, document);
        theirs.push(took);
        let (took, tokens) = tokenize(&encoder, &completion(document), None);
        ours.push(took);
        assert_eq!(tokens[..], known);
    }
    run.add(ComparedMeasure::new(name, "µs", Some(0.02)), &theirs, &ours);
}

/// Measures the same with new encoders. Their caches have only the words of the texts that verify
/// the fast tokenizer.
fn just_loaded(run: &mut LimitRun, documents: &[String], library: &Tokenizer) {
    let name = "tokenize 32k tokens, first request on the fast path";
    if !run.wants(name) {
        return;
    }
    let mut theirs = Vec::new();
    let mut ours = Vec::new();
    for document in documents.iter().rev().take(run.rounds.min(5)) {
        let (took, known) = library_tokenizes(&library.clone(), document);
        theirs.push(took);
        let (took, tokens) = tokenize(&encoder(1 << 28), &completion(document), None);
        ours.push(took);
        assert_eq!(tokens[..], known);
    }
    run.add(ComparedMeasure::new(name, "µs", Some(0.02)), &theirs, &ours);
}

fn chat(texts: &[&str]) -> ApiRequest {
    let message = |(number, text): (usize, &&str)| -> Value {
        let role = if number.is_multiple_of(2) {
            "user"
        } else {
            "assistant"
        };
        json!({"role": role, "content": text})
    };
    let messages: Vec<Value> = texts.iter().enumerate().map(message).collect();
    let body = json!({"model": "m", "messages": messages}).to_string();
    openai::parse(ApiKind::ChatCompletions, body.as_bytes()).expect("a chat")
}

/// Measures a chat of which all but the last one or two messages were tokenized before. The same
/// chat without a cache is the reference. Every round uses another chat.
fn next_turn(run: &mut LimitRun, documents: &[String]) {
    let rows = [
        ("tokenize, one new message in a chat of 50", 1, false),
        ("tokenize, two new messages in a chat of 50", 2, false),
        (
            "tokenize and hash, one new message in a chat of 50",
            1,
            true,
        ),
    ];
    for (name, new, hashing) in rows {
        let absolute = format!("{name}, beside {TURN} µs");
        if !run.wants(name) && !run.wants(&absolute) {
            continue;
        }
        let encoder = encoder(1 << 30);
        let timed = |request: &ApiRequest, cache_namespace: &str| {
            let (took, tokens) = tokenize(&encoder, request, Some(cache_namespace));
            let hash = measure_cpu(|| {
                hashing
                    .then(|| tokens.block_hashes(&CacheSalt::default(), BLOCK, BlockWindows::Plain))
            });
            (took + hash / 1e3, tokens)
        };
        let mut cold = Vec::new();
        let mut warm = Vec::new();
        let corpus: String = documents.concat();
        for round in 0..run.rounds {
            let start = corpus.floor_char_boundary(round * 37_003);
            let texts: Vec<&str> = (0..MESSAGES)
                .map(|at| {
                    let from = corpus.floor_char_boundary(start + at * MESSAGE);
                    &corpus[from..corpus.floor_char_boundary(from + MESSAGE)]
                })
                .collect();
            let before = chat(&texts[..MESSAGES - new]);
            let whole = chat(&texts);
            let (took, known) = timed(&whole, &format!("cold {round}"));
            cold.push(took);
            timed(&before, &format!("warm {round}"));
            let (took, tokens) = timed(&whole, &format!("warm {round}"));
            warm.push(took);
            assert_eq!(tokens, known);
        }
        run.add(ComparedMeasure::new(name, "µs", Some(0.05)), &cold, &warm);
        if new == 1 {
            run.add(
                ComparedMeasure::new(&absolute, "µs", Some(1.0)),
                &[TURN],
                &warm,
            );
        }
    }
}

/// Returns the vocabulary in the format of the `bpe` crate's linear byte pair encoding.
fn linear(library: &Tokenizer) -> BytePairEncoding {
    let ModelWrapper::BPE(model) = library.get_model() else {
        panic!("not a byte pair encoding")
    };
    let mut tokens: Vec<(u32, String)> = model
        .get_vocab()
        .into_iter()
        .map(|(token, id)| (id, token))
        .collect();
    tokens.sort_unstable();
    let written = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let moved: Vec<u8> = (0..=u8::MAX).filter(|byte| !written(byte)).collect();
    let byte = |char: char| match char as u32 {
        code @ 0x100.. => moved[code as usize - 0x100],
        code => code as u8,
    };
    let tokens: Vec<Vec<u8>> = tokens
        .iter()
        .map(|(_, token)| token.chars().map(byte).collect())
        .collect();
    let factor = find_hash_factor_for_dictionary(tokens.iter().cloned());
    BytePairEncoding::from_dictionary(tokens, Some(factor))
}

fn hostile(run: &mut LimitRun) {
    let mut rng = StdRng::seed_from_u64(7);
    let mut random_text = |letters: &[u8]| -> String {
        (0..WORD)
            .map(|_| char::from(letters[rng.random_range(0..letters.len())]))
            .collect()
    };
    let lower: Vec<u8> = (b'a'..=b'z').collect();
    let base64: Vec<u8> = (b'a'..=b'z')
        .chain(b'A'..=b'Z')
        .chain(b'0'..=b'9')
        .chain(*b"+/")
        .collect();
    let letters = random_text(&lower);
    let base64 = random_text(&base64);
    let bytes: Vec<u8> = (0..WORD).map(|_| rng.random()).collect();
    let texts = [
        ("one letter", "a".repeat(WORD)),
        ("spaces", " ".repeat(WORD)),
        ("random letters", letters),
        ("random bytes", String::from_utf8_lossy(&bytes).into_owned()),
        ("base64", base64),
        ("symbols", "Ⓐ!".repeat(WORD / 4)),
        ("letters with marks", "e\u{301}".repeat(WORD / 3)),
    ];
    if texts
        .iter()
        .all(|(name, _)| !run.wants(&hostile_name(name)) && !run.wants(&worst_name(name)))
    {
        return;
    }
    let encoder = encoder(1 << 28);
    let linear = linear(&library());
    for (name, text) in &texts {
        let request = completion(text);
        let mut theirs = Vec::new();
        let mut ours = Vec::new();
        for _ in 0..run.rounds.min(7) {
            theirs.push(measure_cpu(|| linear.encode_via_backtracking(text.as_bytes())) / 1e6);
            ours.push(tokenize(&encoder, &request, None).0 / 1e3);
        }
        run.add(
            ComparedMeasure::new(&hostile_name(name), "ms", Some(3.0)),
            &theirs,
            &ours,
        );
        run.add(
            ComparedMeasure::new(&worst_name(name), "ms", Some(1.0)),
            &[WORST],
            &ours,
        );
    }
}

fn hostile_name(text: &str) -> String {
    format!("1 MiB of {text}")
}

fn worst_name(text: &str) -> String {
    format!("1 MiB of {text}, beside {WORST} ms")
}
