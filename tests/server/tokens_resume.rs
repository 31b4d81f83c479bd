//! Tokens and block hashes that resume from earlier prompts, compared with those computed from the
//! beginning.
//!
//! Conversations are random: many alphabets, texts with special tokens and parts of them, several
//! turns, changes in the middle, common prefixes, and caches that are too small. Each run tests a
//! fixed and a random seed for a limited time. `WARMROUTE_FUZZ_CONVERSATIONS=100000 cargo test
//! --release --test server -- --nocapture tokens_resume` runs that many conversations for each
//! tokenizer. With `WARMROUTE_TOKENIZERS=DIR` and `--include-ignored`, the tokenizers in
//! `DIR/NAME/tokenizer.json[.gz]` are tested too.

#![expect(
    clippy::disallowed_methods,
    reason = "the duration is set by the caller"
)]
#![expect(
    clippy::print_stdout,
    reason = "the figures of a long run are its result"
)]

mod made;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};
use serde_json::{Value, json};
use warmroute_core::block::{BlockHashes, BlockWindows, CacheSalt, PromptContent};
use warmroute_core::worker::BlockSize;
use warmroute_metrics::{Metrics, OutcomeLabel};
use warmroute_tokens::openai::{self, ApiKind, MessageCache};
use warmroute_tokens::prompt::{
    Config, Encoder, LoadError, ModelTraits, PromptCache, RenderedPrompt, TokenBudget,
};

/// Number of threads that share one tokenizer and one cache.
const THREADS: u64 = 2;

/// Duration for each tokenizer.
const DURATION: Duration = Duration::from_secs(if cfg!(long_tests) { 10 } else { 2 });

/// Fixed seed of every run. The other seeds are random.
const SEED: u64 = 20_261_121;

/// A tokenizer with a prompt cache, and texts for its prompts.
struct TestedTokenizer {
    name: String,
    encoder: Encoder,
    cache: Arc<PromptCache>,
    message_cache: MessageCache,
    metrics: Arc<Metrics>,
    /// Contents of its added tokens.
    added: Vec<String>,
    /// System prompts that many conversations share.
    systems: Vec<String>,
    has_template: bool,
}

#[derive(Default)]
struct RunFigures {
    conversations: AtomicUsize,
    prompts: AtomicUsize,
    bytes: AtomicUsize,
    blocks: AtomicUsize,
    failed: AtomicUsize,
    /// Prompts of which only the end was rendered.
    resumed_prompts: AtomicUsize,
}

/// Loads a tokenizer with the template next to it. If the template of a downloaded tokenizer is not
/// supported, prints a message and uses a simple template.
fn load(name: &str, tokenizer: &Path, ours: bool) -> Encoder {
    const PLAIN: &str = "{% for message in messages %}{{ bos_token }}{{ message.content }}{{ eos_token }}{% endfor %}";
    let config = |chat_template| Config {
        tokenizer: tokenizer.to_owned(),
        tokenizer_config: None,
        chat_template,
    };
    // Without a model type, the tokenizer is built as its file is written.
    let written = !tokenizer.with_file_name("config.json").is_file();
    let tokenizer_class = written.then(|| "TokenizersBackend".to_owned());
    let traits = ModelTraits {
        tokenizer_class,
        ..ModelTraits::default()
    };
    match Encoder::load_with_traits(&config(None), &traits) {
        Ok(encoder) => encoder,
        Err(error @ LoadError::Template { .. }) if !ours => {
            println!("{name}: uses a plain template, because of {error}");
            let mut file = tempfile::NamedTempFile::new().unwrap();
            std::io::Write::write_all(&mut file, PLAIN.as_bytes()).unwrap();
            Encoder::load_with_traits(&config(Some(file.path().to_owned())), &traits).unwrap()
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

fn tested_tokenizer(name: &str, directory: &Path, ours: bool) -> TestedTokenizer {
    let files = ["tokenizer.json", "tokenizer.json.gz"].map(|name| directory.join(name));
    let tokenizer = files.into_iter().find(|file| file.is_file()).unwrap();
    let metrics = Arc::new(Metrics::new());
    let cache = PromptCache::new(16 << 20, metrics.clone());
    let (encoder, resumes) = load(name, &tokenizer, ours).with_prompt_cache(cache.clone());
    assert_eq!(resumes, Ok(()), "{name}");
    // Some tokenizers cannot use the fast path. They must resume as well.
    let _ = encoder.enable_fast_path();
    let added = made::added_tokens(&tokenizer);
    let mut random = SmallRng::seed_from_u64(SEED);
    let systems = (0..12).map(|_| text(&mut random, &added, 1500)).collect();
    let chat = openai::parse(
        ApiKind::ChatCompletions,
        br#"{"messages":[{"role":"user","content":"x"}]}"#,
    )
    .unwrap();
    let has_template = encoder.render(&chat).is_ok();
    TestedTokenizer {
        name: name.to_owned(),
        encoder,
        message_cache: MessageCache::new(cache.clone()),
        cache,
        metrics,
        added,
        systems,
        has_template,
    }
}

/// Returns a random text of up to `most` bytes, or slightly more.
fn text(random: &mut impl Rng, added: &[String], most: usize) -> String {
    let wanted = random.random_range(0..=most);
    let mut text = String::new();
    while text.len() < wanted {
        piece(random, added, &mut text);
    }
    text
}

fn pick(random: &mut impl Rng, from: &[&str], most: usize) -> String {
    (0..random.random_range(1..=most))
        .map(|_| *from.choose(random).unwrap())
        .collect()
}

const WORDS: &[&str] = &[
    "the ", "Router ", "isn't ", "cache", " WARM", "ing, ", "e.g. ", "hello", "\u{2581}", "x ",
];
const CODE: &[&str] = &[
    "<", ">", "<|", "|>", "</", "{", "\"k\": ", "==", "!=", "[", "]", "\\n", "<s", "s>", "0x1F",
    "//",
];
const CJK: &[&str] = &[
    "\u{4f60}\u{597d}",
    "\u{4e16}\u{754c}",
    "\u{3002}",
    "\u{3053}\u{3093}",
    "\u{ac00}\u{b098}",
    "\u{20bb7}",
];
const EMOJI: &[&str] = &[
    "\u{1f600}",
    "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}",
    "\u{1f3f3}\u{fe0f}\u{200d}\u{1f308}",
    "\u{1f1e9}\u{1f1ea}",
    "\u{1f44d}\u{1f3fd}",
    "\u{200d}",
    "\u{fe0f}",
];
const MARKS: &[&str] = &[
    "e\u{301}",
    "\u{e9}",
    "a\u{308}\u{304}",
    "\u{301}",
    "\u{fb01}",
    "\u{1e9b}\u{323}",
    "\u{212b}",
    "\u{0e33}",
    "\u{1100}\u{1161}\u{11a8}",
    "I\u{307}",
];
const CONTROL: &[&str] = &[
    "\0", "\u{1}", "\u{7f}", "\u{85}", "\u{feff}", "\u{200b}", "\u{fffd}", "\u{ad}", "\u{2028}",
];
const SPACE: &[&str] = &[
    " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u{a0}", "\u{3000}", "    ",
];
const OTHER: &[&str] = &[
    "\u{645}\u{631}\u{62d}\u{628}\u{627} ",
    "\u{5e9}\u{5dc}",
    "\u{43f}\u{440}\u{438}",
    "\u{939}\u{93f}\u{928}\u{94d}",
    "\u{0df}\u{130}",
];

/// Appends random text of one alphabet.
fn piece(random: &mut impl Rng, added: &[String], text: &mut String) {
    let added = added.choose(random).map_or("", String::as_str);
    match random.random_range(0..16) {
        0..4 => text.push_str(&pick(random, WORDS, 12)),
        4 => text.push_str(&pick(random, CODE, 10)),
        5 => text.push_str(&pick(random, CJK, 10)),
        6 => text.push_str(&pick(random, EMOJI, 5)),
        7 => text.push_str(&pick(random, MARKS, 6)),
        8 => text.push_str(&pick(random, CONTROL, 3)),
        9 => text.push_str(&pick(random, SPACE, 8)),
        10 => text.push_str(&pick(random, OTHER, 6)),
        11 => text.push_str(added),
        12 => text.push_str(&part(random, added)),
        13 => text.extend([part(random, added).as_str(), added]),
        14 => text.extend((0..random.random_range(1..20)).map(|_| random.random::<char>())),
        _ => text.push_str(&"1234567890 ".repeat(random.random_range(1..4))),
    }
}

/// Returns a random part of a special token.
fn part(random: &mut impl Rng, of: &str) -> String {
    let characters: Vec<char> = of.chars().collect();
    let from = random.random_range(0..=characters.len());
    let to = random.random_range(from..=characters.len());
    characters[from..to].iter().collect()
}

/// Returns a completion request with this prompt and random options.
fn completion(random: &mut impl Rng, text: &str) -> Value {
    let mut request = json!({"prompt": text});
    if random.random_bool(0.5) {
        request["add_special_tokens"] = json!(random.random_bool(0.5));
    }
    if random.random_bool(0.1) {
        request["truncate_prompt_tokens"] = json!(random.random_range(1..800));
        request["truncation_side"] = json!(["left", "right"].choose(random).unwrap());
    }
    request
}

/// Returns the requests of a random conversation, turn by turn.
fn conversation(
    random: &mut impl Rng,
    tested_tokenizer: &TestedTokenizer,
) -> Vec<(ApiKind, Value)> {
    let turns = random.random_range(1..6);
    let system = tested_tokenizer.systems.choose(random).unwrap().clone();
    if tested_tokenizer.has_template && random.random_bool(0.2) {
        let mut messages = vec![json!({"role": "system", "content": system})];
        let max_length = *[500, 6000].choose(random).unwrap();
        let special = random.random_bool(0.2);
        let turn = |_| {
            messages.push(
                json!({"role": "user", "content": text(random, &tested_tokenizer.added, max_length)}),
            );
            let request = json!({"messages": messages, "add_special_tokens": special});
            messages.push(
                json!({"role": "assistant", "content": text(random, &tested_tokenizer.added, max_length)}),
            );
            (ApiKind::ChatCompletions, request)
        };
        return (0..turns).map(turn).collect();
    }
    let mut prompt = if random.random_bool(0.8) {
        system
    } else {
        String::new()
    };
    let turn = |_| {
        if random.random_bool(0.1) {
            prompt = changed(random, &prompt);
        }
        for content in [
            text(random, &tested_tokenizer.added, 500),
            text(random, &tested_tokenizer.added, 200),
        ] {
            prompt.push_str(
                tested_tokenizer
                    .added
                    .choose(random)
                    .map_or("", String::as_str),
            );
            prompt.push_str(&content);
        }
        prompt.push_str(
            tested_tokenizer
                .added
                .choose(random)
                .map_or("", String::as_str),
        );
        (ApiKind::Completions, completion(random, &prompt))
    };
    (0..turns).map(turn).collect()
}

/// Returns a text with one character changed, removed or inserted.
fn changed(random: &mut impl Rng, text: &str) -> String {
    let mut characters: Vec<char> = text.chars().collect();
    let at = random.random_range(0..=characters.len());
    match random.random_range(0..3) {
        0 if at < characters.len() => characters[at] = random.random(),
        1 if at < characters.len() => drop(characters.remove(at)),
        _ => characters.insert(at, ['<', 'a', ' ', '>'][random.random_range(0..4)]),
    }
    characters.into_iter().collect()
}

/// Compares tokens and hashes of one prompt with and without the cache.
fn compare(
    random: &mut impl Rng,
    tested_tokenizer: &TestedTokenizer,
    rendered: &RenderedPrompt<'_>,
    figures: &RunFigures,
) {
    let tenant = ["", "a", "b"]
        .choose(random)
        .filter(|name| !name.is_empty())
        .map(|name| (*name).to_owned());
    let plain = tested_tokenizer.encoder.tokenize(rendered);
    let resumed = tested_tokenizer
        .encoder
        .tokenize_cached(rendered, tenant.as_deref());
    let (plain, resumed) = match (plain, resumed) {
        (Ok(plain), Ok(resumed)) => (plain, resumed),
        (plain, resumed) => {
            figures.failed.fetch_add(1, Ordering::Relaxed);
            return assert_eq!(plain.err(), resumed.err(), "{}", tested_tokenizer.name);
        }
    };
    assert_eq!(plain.len(), resumed.len());
    let lora = random.random_bool(0.2).then(|| "adapter".to_owned());
    let salt = CacheSalt {
        lora,
        cache: tenant,
    };
    let block_size = BlockSize::new(*[1, 7, 16, 64, 1000].choose(random).unwrap()).unwrap();
    let windows = if random.random_bool(0.3) {
        BlockWindows::Eagle
    } else {
        BlockWindows::Plain
    };
    for (plain, resumed) in plain.iter().zip(&resumed) {
        assert!(
            plain == &**resumed,
            "{}: other tokens for {:?}",
            tested_tokenizer.name,
            rendered.texts()
        );
        let hashes = BlockHashes::from_content(
            &PromptContent {
                windows,
                ..PromptContent::text(plain, &salt)
            },
            block_size,
        );
        assert_eq!(
            resumed.block_hashes(&salt, block_size, windows),
            hashes,
            "{}: {:?}",
            tested_tokenizer.name,
            rendered.texts()
        );
        figures.blocks.fetch_add(hashes.len(), Ordering::Relaxed);
    }
    figures.prompts.fetch_add(1, Ordering::Relaxed);
    figures.bytes.fetch_add(
        rendered.texts().iter().map(|text| text.len()).sum(),
        Ordering::Relaxed,
    );
}

/// Compares the tokens of a prompt with cached messages and text to those computed without a cache.
fn compare_cached(
    tested_tokenizer: &TestedTokenizer,
    api: ApiKind,
    body: &[u8],
    figures: &RunFigures,
) {
    let TestedTokenizer {
        name,
        encoder,
        message_cache,
        ..
    } = tested_tokenizer;
    let request = openai::parse(api, body).unwrap();
    let (cached, reuse) = openai::parse_body_cached(
        api,
        None,
        &body.to_vec().into(),
        message_cache,
        Some("tenant"),
    )
    .unwrap();
    assert_eq!(cached, request, "{name}");
    let plain = encoder.encode(&request);
    let resumed = encoder.render_cached(&cached, reuse).and_then(|rendered| {
        let is_resumed = usize::from(rendered.is_resumed());
        figures
            .resumed_prompts
            .fetch_add(is_resumed, Ordering::Relaxed);
        encoder.tokenize_bounded(&rendered, Some("tenant"), &TokenBudget::UNLIMITED)
    });
    match (plain, resumed) {
        (Ok(plain), Ok(resumed)) => {
            let resumed = resumed.iter().map(|bounded| &*bounded.tokens);
            assert!(plain.prompts.iter().eq(resumed), "{name}: {request:?}");
        }
        (plain, resumed) => assert_eq!(plain.err(), resumed.err(), "{name}"),
    }
}

fn converse(random: &mut impl Rng, tested_tokenizer: &TestedTokenizer, figures: &RunFigures) {
    if random.random_bool(0.02) {
        // No cache, almost none, room for a few prompts, or enough.
        tested_tokenizer.cache.resize(
            *[0, 3 << 10, 40 << 10, 400 << 10, 16 << 20, 16 << 20]
                .choose(random)
                .unwrap(),
        );
    }
    for (api, request) in conversation(random, tested_tokenizer) {
        let body = serde_json::to_vec(&request).unwrap();
        compare_cached(tested_tokenizer, api, &body, figures);
        let request = openai::parse(api, &body).unwrap();
        // Templates reject some conversations.
        if let Ok(rendered) = tested_tokenizer.encoder.render(&request) {
            compare(random, tested_tokenizer, &rendered, figures);
        }
    }
    figures.conversations.fetch_add(1, Ordering::Relaxed);
}

fn compare_with_cache(name: &str, directory: &Path, ours: bool) {
    let tested_tokenizer = tested_tokenizer(name, directory, ours);
    let wanted = std::env::var("WARMROUTE_FUZZ_CONVERSATIONS")
        .ok()
        .map(|count| count.parse::<usize>().unwrap());
    let figures = RunFigures::default();
    let started = Instant::now();
    let new: u64 = rand::random();
    println!(
        "{name}: {} added tokens, random seeds {SEED} and {new}",
        tested_tokenizer.added.len()
    );
    let continues = || match wanted {
        Some(count) => figures.conversations.load(Ordering::Relaxed) < count,
        None => started.elapsed() < DURATION,
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let tested_tokenizer = &tested_tokenizer;
            let figures = &figures;
            let continues = &continues;
            let seed = if thread == 0 {
                SEED
            } else {
                new.wrapping_add(thread)
            };
            scope.spawn(move || {
                let mut random = SmallRng::seed_from_u64(seed);
                while continues() {
                    converse(&mut random, tested_tokenizer, figures);
                    assert!(tested_tokenizer.cache.bytes() <= 16 << 20);
                }
            });
        }
    });
    report(name, &tested_tokenizer, &figures, started.elapsed());
}

/// Prints the figures of a run, and asserts that prompts were resumed.
fn report(name: &str, tested_tokenizer: &TestedTokenizer, figures: &RunFigures, elapsed: Duration) {
    let metrics = &tested_tokenizer.metrics;
    let lookups = |outcome| {
        metrics
            .tokens
            .prompt_cache_lookups
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    };
    let hits = lookups("hit");
    let misses = lookups("miss");
    let not_resumable = lookups("not_resumable");
    let resumed = metrics.tokens.prompt_cache_hit_tokens.get();
    let all = metrics.tokens.prompt_cache_lookup_tokens.get();
    println!(
        "{name}: {} conversations, {} prompts, {} MB, {} blocks: 0 differences; {hits} hits, {misses} misses, {not_resumable} not resumable; \
         {resumed} of {all} tokens resumed, {} prompts rendered from a checkpoint, {} pieces evicted; {:.1?}",
        figures.conversations.load(Ordering::Relaxed),
        figures.prompts.load(Ordering::Relaxed),
        figures.bytes.load(Ordering::Relaxed) / 1_000_000,
        figures.blocks.load(Ordering::Relaxed),
        figures.resumed_prompts.load(Ordering::Relaxed),
        metrics.tokens.prompt_cache_evictions.get(),
        elapsed,
    );
    // Resuming may fail only if tokenizing from the beginning fails.
    assert!(
        lookups("failed") as usize <= figures.failed.load(Ordering::Relaxed),
        "{name}: resuming failed although tokenizing did not"
    );
    assert!(
        hits > 0 && misses > 0 && resumed > 0,
        "{name}: nothing was resumed, so nothing was tested"
    );
    assert!(
        metrics.tokens.prompt_cache_evictions.get() > 0
            || figures.conversations.load(Ordering::Relaxed) < 500,
        "{name}"
    );
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/models")
        .join(name)
}

/// A reload disables the cache after the beginning of a conversation was found in it.
#[test]
fn found_prefix_outlives_disabled_cache() {
    let TestedTokenizer {
        encoder,
        cache,
        message_cache,
        ..
    } = tested_tokenizer("qwen2.5", &shipped("qwen2.5"), true);
    let long = "a long text ".repeat(1000);
    let answer = json!({"role": "assistant", "content": long});
    let question = json!({"role": "user", "content": long});
    let turns = [&question, &answer, &question, &answer, &question];
    let bodies = [3, 5].map(|count| json!({"messages": &turns[..count]}).to_string());
    for (body, is_resumed) in bodies.iter().zip([false, true]) {
        let (request, reuse) = openai::parse_body_cached(
            ApiKind::ChatCompletions,
            None,
            &body.clone().into(),
            &message_cache,
            Some("tenant"),
        )
        .unwrap();
        let rendered = encoder.render_cached(&request, reuse).unwrap();
        assert_eq!(rendered.is_resumed(), is_resumed);
        if is_resumed {
            cache.resize(0);
        }
        let tokens = encoder
            .tokenize_bounded(&rendered, Some("tenant"), &TokenBudget::UNLIMITED)
            .unwrap();
        let expected = encoder.encode(&request).unwrap();
        assert_eq!(*tokens[0].tokens, *expected.prompts[0]);
    }
}

#[test]
fn qwen_resumes_with_equal_tokens() {
    assert!(tested_tokenizer("qwen2.5", &shipped("qwen2.5"), true).has_template);
    compare_with_cache("qwen2.5", &shipped("qwen2.5"), true);
}

#[test]
fn tinyllama_resumes_with_equal_tokens() {
    assert!(tested_tokenizer("tinyllama", &shipped("tinyllama"), true).has_template);
    compare_with_cache("tinyllama", &shipped("tinyllama"), true);
}

#[test]
fn synthetic_tokenizers_resume_with_equal_tokens() {
    for (name, tokenizer) in made::all() {
        let directory = tempfile::tempdir().unwrap();
        tokenizer
            .save(directory.path().join("tokenizer.json"), false)
            .unwrap();
        compare_with_cache(name, directory.path(), true);
    }
}

#[test]
fn prompt_of_boundary_tokens_stays_within_cache_limit() {
    let tested_tokenizer = tested_tokenizer("qwen2.5", &shipped("qwen2.5"), true);
    let mut random = SmallRng::seed_from_u64(SEED);
    let figures = RunFigures::default();
    for limit in [16 << 20, 100_000] {
        tested_tokenizer.cache.resize(limit);
        for count in [100_000, 100_000, 100_001] {
            let request = json!({"prompt": "<|im_end|>".repeat(count)}).to_string();
            let request = openai::parse(ApiKind::Completions, request.as_bytes()).unwrap();
            compare(
                &mut random,
                &tested_tokenizer,
                &tested_tokenizer.encoder.render(&request).unwrap(),
                &figures,
            );
            assert!(
                tested_tokenizer.cache.bytes() > 0 && tested_tokenizer.cache.bytes() <= limit,
                "{}",
                tested_tokenizer.cache.bytes()
            );
        }
    }
}

#[test]
fn next_turns_render_only_new_messages() {
    let tested_tokenizer = tested_tokenizer("qwen2.5", &shipped("qwen2.5"), true);
    let figures = RunFigures::default();
    let text = "a line of the conversation with <|im_end|> inside\n".repeat(200);
    let mut messages = vec![json!({"role": "system", "content": text})];
    let resumed = |messages: &[Value]| {
        let before = figures.resumed_prompts.load(Ordering::Relaxed);
        let body = json!({"messages": messages}).to_string();
        compare_cached(
            &tested_tokenizer,
            ApiKind::ChatCompletions,
            body.as_bytes(),
            &figures,
        );
        figures.resumed_prompts.load(Ordering::Relaxed) - before
    };
    for turn in 0..4 {
        messages.push(json!({"role": "user", "content": text}));
        assert_eq!(resumed(&messages), usize::from(turn > 0), "turn {turn}");
        messages.push(json!({"role": "assistant", "content": "short"}));
    }
    // Other conversations with the same beginning resume after the first of them was rendered.
    for (other, expected) in [(1, 0), (2, 1), (3, 1)] {
        let question = format!("{other} {text}");
        let branch = [
            &messages[..3],
            &[json!({"role": "user", "content": question})],
        ]
        .concat();
        assert_eq!(resumed(&branch), expected, "branch {other}");
    }
    // After the cache is emptied, the whole text is rendered.
    tested_tokenizer.cache.resize(0);
    tested_tokenizer.cache.resize(16 << 20);
    assert_eq!(resumed(&messages), 0);
    assert_eq!(resumed(&messages), 1);
}

#[test]
#[ignore = "reads tokenizers in WARMROUTE_TOKENIZERS, which are not in the repository"]
fn downloaded_tokenizers_resume_with_equal_tokens() {
    let directory =
        std::env::var("WARMROUTE_TOKENIZERS").expect("WARMROUTE_TOKENIZERS must be set");
    let mut directories: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    directories.retain(|directory| {
        directory.join("tokenizer.json").is_file() || directory.join("tokenizer.json.gz").is_file()
    });
    directories.sort();
    assert!(
        !directories.is_empty(),
        "the directory contains no tokenizer"
    );
    for directory in directories {
        compare_with_cache(
            directory.file_name().unwrap().to_str().unwrap(),
            &directory,
            false,
        );
    }
}
