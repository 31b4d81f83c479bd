//! Everything that decides, in one process and without a network: a way in, a router with workers, their index.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt;
use warmroute::block::{BlockHashes, EngineHash, MediaTokens, TrackingHash, Windows};
use warmroute::fleet::Fleet;
use warmroute::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock};
use warmroute::intake::config::ClientsConfig;
use warmroute::intake::{Body, Intake, Limits, Model, Models, Parts};
use warmroute::load::LoadTracker;
use warmroute::openai::paths::{Paths, PathsConfig};
use warmroute::prompt::Encoder;
use warmroute::router::{Booked, Prompt, RouteRequest, Router, RouterSettings};
use warmroute::tier::Tier;
use warmroute::worker::{BlockSize, Endpoint, Slot, Worker, WorkerId};

use super::duel::cpu;

/// Tokens per block.
pub(crate) const BLOCK: BlockSize = BlockSize(NonZeroU32::new(16).expect("16 is not zero"));
const PATH: &str = "/v1/chat/completions";

/// The way from bodies to workers.
pub(crate) struct Bed {
    intake: Arc<Intake>,
    router: Router,
    writers: Vec<RankWriter>,
}

impl Bed {
    /// So many workers, who hold nothing.
    pub(crate) fn new(encoder: Encoder, workers: u32) -> Self {
        let mut models = Models::default();
        let model = Model {
            name: "m".into(),
            block_size: BLOCK,
            windows: Windows::Plain,
            media: MediaTokens::default(),
            encoder: Some(Arc::new(encoder)),
        };
        models.add(model, &[], &[]);
        let intake = Intake::new(Parts {
            models,
            paths: Paths::new(&PathsConfig::default()),
            clients: ClientsConfig::default(),
            confine: Default::default(),
            rewrites: warmroute::intake::Rewrites::default(),
            rewrite_headers: Vec::new(),
            cluster: Default::default(),
            limits: Limits {
                inline: usize::MAX,
                queue: 1,
                deadline: Duration::from_secs(10),
            },
            tracking: TrackingHash::Public,
            sessions: None,
            shared: None,
            remote: None,
            tokens: HashMap::new(),
        });
        let (index, load) = (PrefixIndex::new(), LoadTracker::new(Instant::now));
        let router = Router::new(index.clone(), load.clone(), RouterSettings::default(), 7);
        let worker = |id: u32| {
            let [_, a, b, c] = id.to_be_bytes();
            Worker::new(
                WorkerId(u64::from(id)),
                Endpoint(([10, a, b, c], 8000).into()),
                "m".into(),
                BLOCK,
            )
        };
        let change = Fleet::empty().reconcile((0..workers).map(worker).collect());
        change
            .added
            .iter()
            .for_each(|member| load.open(member.slot, member.rank));
        router.publish(change.fleet.into());
        let writers = (0..workers).map(|slot| index.join(Slot(slot))).collect();
        Self {
            intake,
            router,
            writers,
        }
    }

    /// Microseconds from a body to a booked worker, and the prompt's blocks.
    pub(crate) fn decide(&self, body: &Bytes) -> (f64, BlockHashes, Booked) {
        let mut decided = None;
        let took = cpu(|| {
            let taken = self
                .intake
                .take(PATH, &|_| None, &Body::Whole(body.clone()))
                .now_or_never();
            let request = taken.expect("nothing to wait for").request;
            let Prompt::Hashed(hashes) = &request.prompt else {
                panic!("the prompt is not hashed")
            };
            let hashes = hashes[0].clone();
            decided = Some((hashes, self.router.route(request).expect("a worker")));
        });
        let (hashes, booked) = decided.expect("it was decided");
        (took / 1e3, hashes, booked)
    }

    /// Books a worker for a prompt that is hashed already.
    pub(crate) fn route(&self, hashes: &BlockHashes) -> Booked {
        let request = RouteRequest::new(Some("m".into()), Prompt::Hashed(vec![hashes.clone()]));
        self.router.route(request).expect("a worker")
    }

    /// A worker has cached a prompt from now on.
    pub(crate) fn store(&mut self, worker: usize, hashes: &BlockHashes) {
        let blocks = hashes.locals().iter().zip(hashes.sequences());
        let blocks = blocks
            .map(|(&local, sequence)| StoredBlock {
                engine: EngineHash(sequence.0),
                local,
            })
            .collect();
        let writer = &mut self.writers[worker];
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks,
            tier: Tier::Device,
        });
    }
}
