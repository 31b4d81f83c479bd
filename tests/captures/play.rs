//! Captured sessions played through: each request is read as it would be on its way to a worker, the index holds what the
//! engine's events told before it, and what is then foreseen is held against what the engine found cached.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::Value;
use warmroute::block::{MediaTokens, TrackingHash, Windows};
use warmroute::index::{Outcome, Overlaps, PrefixIndex, RankWriter};
use warmroute::intake::config::ClientsConfig;
use warmroute::intake::{Intake, Limits, Model, Models, Parts};
use warmroute::kv_events::{Converted, Normalizer, wire};
use warmroute::openai::Paths;
use warmroute::prompt::media::{ItemRule, Rule};
use warmroute::prompt::{Config, Encoder, MediaConfig, Traits};
use warmroute::router::Prompt;
use warmroute::worker::{BlockSize, Slot};

#[derive(Deserialize)]
struct Session {
    instance: String,
    block_size: u32,
    requests: Vec<Request>,
}

#[derive(Deserialize)]
struct Request {
    scenario: String,
    path: String,
    request: Value,
    #[serde(default)]
    prompt_tokens: Option<usize>,
    #[serde(default)]
    cached_tokens: Option<usize>,
    #[serde(default)]
    engine: Option<Vec<u32>>,
    /// The rank that was asked for, where one was.
    #[serde(default)]
    rank: Option<u32>,
    /// What the engine told before the next request.
    payloads: Vec<String>,
}

const TOKENIZER: &str = "examples/models/qwen2.5/tokenizer.json.gz";
const VISION: &str = "tests/data/tokens/qwen2-vl";
/// As `<|image_pad|>` is numbered.
const IMAGE: u32 = 151_655;

fn encoder(vision: bool) -> Arc<Encoder> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = vision.then(|| root.join(VISION).join("tokenizer_config.json"));
    let image = ItemRule {
        token: "<|image_pad|>".to_owned(),
        placeholder: None,
        rule: Rule::Qwen2Vl,
        tokens: None,
        preprocessor: Some(root.join(VISION).join("preprocessor_config.json")),
        patch_size: None,
        merge_size: None,
        min_pixels: None,
        max_pixels: None,
    };
    // Where the captured engine's model lay.
    let media = MediaConfig {
        model: Some("models/tiny-qwen2vl".into()),
        image: Some(image),
        ..MediaConfig::default()
    };
    let traits = Traits {
        name: "vision".into(),
        media: vision.then_some(media),
        ..Traits::default()
    };
    let files = Config {
        tokenizer: root.join(TOKENIZER),
        tokenizer_config: config,
        chat_template: None,
    };
    let encoder = Encoder::load_as(&files, &traits).unwrap();
    assert_eq!(encoder.quicken(), Ok(()));
    Arc::new(encoder)
}

fn intake(block_size: BlockSize, media: MediaTokens, encoders: &[Arc<Encoder>; 2]) -> Arc<Intake> {
    let mut models = Models::default();
    for (name, vision) in [("tiny-qwen", 0), ("tiny-gemma3", 0), ("tiny-qwen2vl", 1)] {
        let encoder = Some(encoders[vision].clone());
        let model = Model {
            name: name.into(),
            block_size,
            windows: Windows::Plain,
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
    Intake::new(Parts {
        models,
        paths: Paths::default(),
        clients: ClientsConfig::default(),
        confine: Default::default(),
        rewrites: warmroute::intake::Rewrites::default(),
        rewrite_headers: Vec::new(),
        cluster: Default::default(),
        limits: Limits {
            inline: 1 << 20,
            queue: 1,
            deadline: Duration::from_secs(60),
        },
        tracking: TrackingHash::Public,
        sessions: None,
        shared: None,
        remote: None,
        tokens: Default::default(),
    })
}

/// One engine as its events show it, rank by rank.
struct Seen {
    index: Arc<PrefixIndex>,
    ranks: BTreeMap<u32, (RankWriter, Normalizer)>,
    block_size: BlockSize,
    media: MediaTokens,
}

impl Seen {
    fn apply(&mut self, payloads: &[String]) -> Vec<u32> {
        let mut ranks = Vec::new();
        for payload in payloads {
            let batch = wire::decode(&super::bytes(payload)).unwrap();
            let rank = batch.rank.unwrap_or_default();
            ranks.push(rank);
            let (index, size, media) = (&self.index, self.block_size, self.media);
            let (writer, normalizer) = self
                .ranks
                .entry(rank)
                .or_insert_with(|| (index.join(Slot(rank)), Normalizer::new(size, media)));
            for event in &batch.events {
                match normalizer.convert(event) {
                    Converted::Event(event) | Converted::Group(_, event) => {
                        // Equal blocks are stored anew, and of what came before the capture's gaps nothing is known.
                        let outcome = writer.apply(&event);
                        assert!(
                            !matches!(outcome, Outcome::TooManyGroups | Outcome::TooManyWaiting),
                            "{outcome:?}"
                        );
                    }
                    Converted::Regrouped(..) | Converted::Resized(_) => {
                        panic!("blocks of another size")
                    }
                    Converted::Filtered(reason) => panic!("{reason:?}"),
                }
            }
        }
        ranks
    }

    /// Takes in a reset that was not told of before the first batch behind it.
    fn clear(&mut self, payloads: &[String]) {
        let mut found = false;
        for payload in payloads {
            let batch = wire::decode(&super::bytes(payload)).unwrap();
            let Some(at) = batch
                .events
                .iter()
                .position(|event| matches!(event, wire::Event::Cleared { .. }))
            else {
                continue;
            };
            let (writer, normalizer) = self.ranks.get_mut(&batch.rank.unwrap_or_default()).unwrap();
            for event in &batch.events[..=at] {
                let Converted::Event(event) = normalizer.convert(event) else {
                    panic!("{event:?}")
                };
                writer.apply(&event);
            }
            found = true;
        }
        assert!(found, "the engine never tells of its reset");
    }

    /// Tokens that a rank would not have to compute.
    fn reusable(&self, prompt: &Prompt, rank: u32) -> usize {
        let size = self.block_size.tokens();
        let of_prompt = |hashes: &warmroute::block::BlockHashes| {
            let mut overlaps = Overlaps::new();
            self.index.overlaps(hashes, &mut overlaps);
            // The last token is always computed.
            let most = hashes.tokens().saturating_sub(1) / size;
            (overlaps.get(Slot(rank)).device as usize).min(most) * size
        };
        prompt.blocks().iter().map(of_prompt).sum()
    }
}

#[derive(Default)]
struct Count {
    requests: usize,
    equal: usize,
    by_tokens: usize,
    over: Vec<String>,
    under: Vec<String>,
    /// Of the equal ones, those before which a reset was taken in that the engine told of only with their own events.
    after_reset: usize,
    /// Of the equal ones, those with several answers to one prompt.
    siblings: usize,
}

/// Where the engine's hashes name the model's images natively and by pad tokens.
fn play(media: MediaTokens, encoders: &[Arc<Encoder>; 2]) -> BTreeMap<String, Count> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/sessions.json.gz");
    let mut json = Vec::new();
    GzDecoder::new(std::fs::File::open(file).unwrap())
        .read_to_end(&mut json)
        .unwrap();
    let sessions: Vec<Session> = serde_json::from_slice(&json).unwrap();
    let mut counts: BTreeMap<String, Count> = BTreeMap::new();
    for session in &sessions {
        let block_size = BlockSize::new(session.block_size).unwrap();
        let intake = intake(block_size, media, encoders);
        let mut seen = Seen {
            index: PrefixIndex::new(),
            ranks: BTreeMap::new(),
            block_size,
            media,
        };
        let mut reset = false;
        for request in &session.requests {
            let (Some(cached), Some(length)) = (request.cached_tokens, request.prompt_tokens)
            else {
                // The engine tells of it only with its next batch.
                reset |= request.path == "/reset_prefix_cache";
                continue;
            };
            let count = counts.entry(request.scenario[..1].to_owned()).or_default();
            count.requests += 1;
            let body = serde_json::to_vec(&request.request).unwrap();
            let taken = intake.take_now(None, &request.path, &|_| None, &body);
            let label = format!("{} of {}", request.scenario, session.instance);
            let Prompt::Hashed(prompts) = &taken.request.prompt else {
                panic!("{label}: {:?}", taken.request.prompt)
            };
            assert_eq!(
                prompts.iter().map(|prompt| prompt.tokens()).sum::<usize>(),
                length,
                "{label}"
            );
            if let Some(engine) = &request.engine {
                assert_eq!(taken.tokens, [engine.as_slice()], "{label}");
                count.by_tokens += 1;
            }
            if std::mem::take(&mut reset) {
                seen.clear(&request.payloads);
                count.after_reset += 1;
            }
            let before: BTreeMap<u32, usize> = seen
                .ranks
                .keys()
                .map(|&rank| (rank, seen.reusable(&taken.request.prompt, rank)))
                .collect();
            let ranks = seen.apply(&request.payloads);
            // Which rank served is told by the events that followed; where none did, all ranks that exist must agree.
            let mut foreseen: Vec<usize> = match ranks.first().or(request.rank.as_ref()) {
                Some(rank) => vec![before.get(rank).copied().unwrap_or(0)],
                None if before.is_empty() => vec![0],
                None => before.values().copied().collect(),
            };
            foreseen.dedup();
            assert_eq!(foreseen.len(), 1, "{label}: {before:?}");
            let mut foreseen = foreseen[0];
            if request.request["n"].as_u64().is_some_and(|n| n > 1) {
                // Of several answers to one prompt the engine reports one that found what the first had stored.
                let [rank] = ranks
                    .iter()
                    .collect::<BTreeSet<_>>()
                    .into_iter()
                    .collect::<Vec<_>>()[..]
                else {
                    panic!("{label}: events of {ranks:?}")
                };
                foreseen = seen.reusable(&taken.request.prompt, *rank);
                count.siblings += 1;
            }
            match foreseen.cmp(&cached) {
                std::cmp::Ordering::Equal => count.equal += 1,
                std::cmp::Ordering::Greater => count
                    .over
                    .push(format!("{label}: {foreseen} foreseen, {cached} cached")),
                std::cmp::Ordering::Less => count
                    .under
                    .push(format!("{label}: {foreseen} foreseen, {cached} cached")),
            }
        }
    }
    counts
}

#[test]
fn what_is_foreseen_of_every_captured_request_is_what_its_engine_found_cached() {
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
            "\nreusable tokens, foreseen against cached_tokens (images: {:?})\n",
            media.image
        );
        for (scenario, count) in &counts {
            let Count {
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
                 ids, all equal; of the equal ones {after_reset} with a reset not yet announced taken into account, {siblings} with \
                 a second answer to the same prompt\n",
                over.len(),
                under.len()
            );
            report.extend(over.iter().chain(under).map(|line| format!("    {line}\n")));
        }
        // Straight to the terminal: what tests print by macros is shown only when they fail.
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
