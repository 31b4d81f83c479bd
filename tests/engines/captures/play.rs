//! Playback of captured sessions. The index holds the events that the engine sent before a request.
//! The predicted cached tokens are compared with those that the engine reported.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::Value;
use warmroute_core::block::{BlockWindows, MediaTokens};
use warmroute_core::index::{ApplyOutcome, Overlaps, PrefixIndex, RankWriter};
use warmroute_core::router::RoutePrompt;
use warmroute_core::worker::{BlockSize, RankSlot};
use warmroute_engines::kv_events::{ConvertedEvent, EventNormalizer, wire};
use warmroute_server::request::config::ClientsConfig;
use warmroute_server::request::{
    ConfiguredModel, EncodeLimits, ModelRegistry, PreprocessorParts, RequestPreprocessor,
};
use warmroute_server::tracking_hash::TrackingHash;
use warmroute_tokens::openai::ApiPaths;
use warmroute_tokens::prompt::media::ImageRule;
use warmroute_tokens::prompt::{Config, Encoder, MediaConfig, ModelTraits};

#[derive(Deserialize)]
struct CapturedSession {
    instance: String,
    block_size: u32,
    requests: Vec<CapturedRequest>,
}

#[derive(Deserialize)]
struct CapturedRequest {
    scenario: String,
    path: String,
    request: Value,
    #[serde(default)]
    prompt_tokens: Option<usize>,
    #[serde(default)]
    cached_tokens: Option<usize>,
    #[serde(default)]
    engine: Option<Vec<u32>>,
    /// Rank that the client requested, if any.
    #[serde(default)]
    rank: Option<u32>,
    /// Event batches between this request and the next one.
    payloads: Vec<String>,
}

const TOKENIZER: &str = "examples/models/qwen2.5/tokenizer.json.gz";
const VISION: &str = "tests/data/tokens/qwen2-vl";
/// Token id of `<|image_pad|>`.
const IMAGE: u32 = 151_655;

fn encoder(vision: bool) -> Arc<Encoder> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = vision.then(|| root.join(VISION).join("tokenizer_config.json"));
    let image = ImageRule {
        token: "<|image_pad|>".to_owned(),
        placeholder: None,
        tokens_per_item: None,
        preprocessor_config: Some(root.join(VISION).join("preprocessor_config.json")),
    };
    // Path of the model in the captured engine.
    let media = MediaConfig {
        model: Some("models/tiny-qwen2vl".into()),
        image: Some(image),
        ..MediaConfig::default()
    };
    let traits = ModelTraits {
        name: "vision".into(),
        media: vision.then_some(media),
        ..ModelTraits::default()
    };
    let files = Config {
        tokenizer: root.join(TOKENIZER),
        tokenizer_config: config,
        chat_template: None,
    };
    let encoder = Encoder::load_with_traits(&files, &traits).unwrap();
    assert_eq!(encoder.enable_fast_path(), Ok(()));
    Arc::new(encoder)
}

fn preprocessor(
    block_size: BlockSize,
    media: MediaTokens,
    encoders: &[Arc<Encoder>; 2],
) -> Arc<RequestPreprocessor> {
    let mut models = ModelRegistry::default();
    for (name, vision) in [("tiny-qwen", 0), ("tiny-gemma3", 0), ("tiny-qwen2vl", 1)] {
        let encoder = Some(encoders[vision].clone());
        let model = ConfiguredModel {
            name: name.into(),
            block_size,
            windows: BlockWindows::Plain,
            media,
            encoder,
        };
        let adapters = if name == "tiny-qwen" {
            vec!["lora-x".into(), "lora-y".into()]
        } else {
            vec![]
        };
        models.add(model, &[], &adapters);
    }
    RequestPreprocessor::new(PreprocessorParts {
        models,
        message_cache: None,
        paths: ApiPaths::default(),
        clients: ClientsConfig::default(),
        nvext: Default::default(),
        pool_routes: Default::default(),
        rewrites: warmroute_server::request::RewriteRules::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        limits: EncodeLimits {
            inline: 1 << 20,
            queue: 1,
            deadline: Duration::from_secs(60),
        },
        tracking_hash: TrackingHash::Public,
        sessions: None,
        shared_cache: None,
        index_client: None,
        token_sources: Default::default(),
    })
}

/// Index of one engine, built from its events, with a writer per rank.
struct ObservedEvents {
    index: Arc<PrefixIndex>,
    ranks: BTreeMap<u32, (RankWriter, EventNormalizer)>,
    block_size: BlockSize,
    media: MediaTokens,
}

impl ObservedEvents {
    fn apply(&mut self, payloads: &[String]) -> Vec<u32> {
        let mut ranks = Vec::new();
        for payload in payloads {
            let batch = wire::decode(&super::bytes(payload)).unwrap();
            let rank = batch.rank.unwrap_or_default();
            ranks.push(rank);
            let index = &self.index;
            let size = self.block_size;
            let media = self.media;
            let (writer, normalizer) = self.ranks.entry(rank).or_insert_with(|| {
                (
                    index.create_writer(RankSlot(rank)),
                    EventNormalizer::new(size, media),
                )
            });
            for event in &batch.events {
                match normalizer.convert(event) {
                    ConvertedEvent::Event(event) | ConvertedEvent::GroupEvent(_, event) => {
                        // Engines store equal blocks again. Blocks from before a gap in the capture
                        // are unknown.
                        let outcome = writer.apply(&event);
                        assert!(
                            !matches!(
                                outcome,
                                ApplyOutcome::TooManyGroups | ApplyOutcome::TooManyWaiting
                            ),
                            "{outcome:?}"
                        );
                    }
                    ConvertedEvent::IndexEvents(..) | ConvertedEvent::BlockSizeChanged(_) => {
                        panic!("blocks of another size")
                    }
                    ConvertedEvent::Filtered(reason) => panic!("{reason:?}"),
                }
            }
        }
        ranks
    }

    /// Applies a cache reset from the batches that announce it, before these batches are applied.
    fn clear(&mut self, payloads: &[String]) {
        let mut found = false;
        for payload in payloads {
            let batch = wire::decode(&super::bytes(payload)).unwrap();
            let Some(at) = batch
                .events
                .iter()
                .position(|event| matches!(event, wire::EngineEvent::Cleared { .. }))
            else {
                continue;
            };
            let (writer, normalizer) = self.ranks.get_mut(&batch.rank.unwrap_or_default()).unwrap();
            for event in &batch.events[..=at] {
                let ConvertedEvent::Event(event) = normalizer.convert(event) else {
                    panic!("{event:?}")
                };
                writer.apply(&event);
            }
            found = true;
        }
        assert!(found, "the engine does not announce its reset");
    }

    /// Returns the number of prompt tokens that a rank has cached.
    fn reusable(&self, prompt: &RoutePrompt, rank: u32) -> usize {
        let size = self.block_size.tokens();
        let reusable_blocks = |hashes: &warmroute_core::block::BlockHashes| {
            let mut overlaps = Overlaps::new();
            self.index.query_overlaps(hashes, &mut overlaps);
            // The last token is always computed.
            let most = hashes.tokens().saturating_sub(1) / size;
            (overlaps.get(RankSlot(rank)).device as usize).min(most) * size
        };
        prompt.blocks().iter().map(reusable_blocks).sum()
    }
}

#[derive(Default)]
struct EventCount {
    requests: usize,
    equal: usize,
    by_tokens: usize,
    over: Vec<String>,
    under: Vec<String>,
    /// Matches for which a reset was applied before the engine announced it.
    after_reset: usize,
    /// Matches with several outputs for one prompt.
    siblings: usize,
}

fn read_sessions() -> Vec<CapturedSession> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/sessions.json.gz");
    let mut json = Vec::new();
    GzDecoder::new(std::fs::File::open(file).unwrap())
        .read_to_end(&mut json)
        .unwrap();
    serde_json::from_slice(&json).unwrap()
}

/// Returns the predicted tokens of the serving rank. If the rank is unknown, all ranks must agree.
fn predicted_tokens(before: &BTreeMap<u32, usize>, served: Option<&u32>, label: &str) -> usize {
    let mut predicted: Vec<usize> = match served {
        Some(rank) => vec![before.get(rank).copied().unwrap_or(0)],
        None if before.is_empty() => vec![0],
        None => before.values().copied().collect(),
    };
    predicted.dedup();
    assert_eq!(predicted.len(), 1, "{label}: {before:?}");
    predicted[0]
}

/// Plays all sessions. `media` selects how engine hashes refer to images: natively or by pad
/// tokens.
fn play(media: MediaTokens, encoders: &[Arc<Encoder>; 2]) -> BTreeMap<String, EventCount> {
    let mut counts: BTreeMap<String, EventCount> = BTreeMap::new();
    for session in &read_sessions() {
        let block_size = BlockSize::new(session.block_size).unwrap();
        let preprocessor = preprocessor(block_size, media, encoders);
        let mut observed = ObservedEvents {
            index: PrefixIndex::new(),
            ranks: BTreeMap::new(),
            block_size,
            media,
        };
        let mut reset = false;
        for request in &session.requests {
            let (Some(cached), Some(length)) = (request.cached_tokens, request.prompt_tokens)
            else {
                // The engine announces a reset only with its next batch.
                reset |= request.path == "/reset_prefix_cache";
                continue;
            };
            let count = counts.entry(request.scenario[..1].to_owned()).or_default();
            count.requests += 1;
            let body = serde_json::to_vec(&request.request).unwrap();
            let preprocessed =
                preprocessor.preprocess_blocking(None, &request.path, &|_| None, &body);
            let label = format!("{} of {}", request.scenario, session.instance);
            let RoutePrompt::Hashed(prompts) = &preprocessed.route_request.prompt else {
                panic!("{label}: {:?}", preprocessed.route_request.prompt)
            };
            assert_eq!(
                prompts.iter().map(|prompt| prompt.tokens()).sum::<usize>(),
                length,
                "{label}"
            );
            if let Some(engine) = &request.engine {
                assert_eq!(preprocessed.tokens, [engine.as_slice()], "{label}");
                count.by_tokens += 1;
            }
            if std::mem::take(&mut reset) {
                observed.clear(&request.payloads);
                count.after_reset += 1;
            }
            let prompt = &preprocessed.route_request.prompt;
            let reusable = |&rank: &u32| (rank, observed.reusable(prompt, rank));
            let before: BTreeMap<u32, usize> = observed.ranks.keys().map(reusable).collect();
            let ranks = observed.apply(&request.payloads);
            let served = ranks.first().or(request.rank.as_ref());
            let mut predicted = predicted_tokens(&before, served, &label);
            if request.request["n"].as_u64().is_some_and(|n| n > 1) {
                // For several outputs of one prompt, the engine reports the output that reused the
                // blocks of the first one.
                let distinct: BTreeSet<_> = ranks.iter().collect();
                assert_eq!(distinct.len(), 1, "{label}: events of {ranks:?}");
                predicted = observed.reusable(&preprocessed.route_request.prompt, ranks[0]);
                count.siblings += 1;
            }
            let difference = format!("{label}: {predicted} predicted, {cached} cached");
            match predicted.cmp(&cached) {
                std::cmp::Ordering::Equal => count.equal += 1,
                std::cmp::Ordering::Greater => count.over.push(difference),
                std::cmp::Ordering::Less => count.under.push(difference),
            }
        }
    }
    counts
}

#[test]
fn predicted_cached_tokens_match_captured_sessions() {
    let encoders = [encoder(false), encoder(true)];
    for media in [
        MediaTokens::default(),
        MediaTokens {
            image: Some(IMAGE),
            video: None,
        },
    ] {
        let counts = play(media, &encoders);
        let mut report = format!(
            "\npredicted tokens compared with cached_tokens (images: {:?})\n",
            media.image
        );
        for (scenario, count) in &counts {
            let EventCount {
                requests,
                equal,
                by_tokens,
                over,
                under,
                after_reset,
                siblings,
            } = count;
            report += &format!(
                "scenarios {scenario}: {requests} requests, {equal} equal, {} over, {} under; {by_tokens} with the engine's token \
                 ids, all equal; of the equal ones, {after_reset} with a reset that was applied before its announcement, {siblings} with \
                 a second output for the same prompt\n",
                over.len(),
                under.len()
            );
            report.extend(over.iter().chain(under).map(|line| format!("    {line}\n")));
        }
        // Written directly to the terminal, because the output of `eprintln!` is shown only if a
        // test fails.
        std::io::stderr().write_all(report.as_bytes()).unwrap();
        assert_eq!(
            counts.keys().map(String::as_str).collect::<Vec<_>>(),
            ["a", "b", "c", "d", "e", "f"]
        );
        for (scenario, count) in &counts {
            assert!(count.over.is_empty(), "{scenario}: {:?}", count.over);
            assert!(count.under.is_empty(), "{scenario}: {:?}", count.under);
        }
    }
}
