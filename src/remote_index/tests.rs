//! The way there and back: what a router decides by an answer is what the router that gave it decides, nonsense is named, and
//! servers that are slow, gone or of another opinion cost a request its deadline at most.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use super::config::RemoteIndexConfig;
use super::*;
use crate::block::{BlockHashes, EngineHash, LocalHash};
use crate::index::event::GroupNeed;
use crate::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock, TierBlocks};
use crate::lifecycle::Readiness;
use crate::load::LoadTracker;
use crate::metrics::{Metrics, OutcomeLabel};
use crate::predict::{Policy, Predictor, Ttl};
use crate::router::{
    Mode, Predictions, Prompt, Reason, Remote, RemoteAnswer, RemoteRank, RemoteRanks, RouteRequest,
    Router, RouterSettings,
};
use crate::settings::Period;
use crate::tier::Tier;
use crate::trust::{Because, Standing, Trust};
use crate::worker::{
    Attach, BlockSize, DpRank, EventSource, ModelName, Worker, WorkerId, WorkerRank,
};

const HASHING: u64 = 99;
const MODEL: &str = "m";

fn size() -> BlockSize {
    BlockSize::new(4).unwrap()
}

fn rank(id: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(id),
        rank: DpRank(0),
    }
}

/// The last worker tells nothing of its cache.
fn workers(count: u64) -> Vec<Worker> {
    let source = || EventSource {
        endpoint: "tcp://127.0.0.1:1".to_owned(),
        topic: String::new(),
        attach: Attach::Connect,
        replay: None,
    };
    let worker = |id: u64| {
        let mut worker = Worker::new(
            WorkerId(id),
            "127.0.0.1:8000".parse().unwrap(),
            MODEL.into(),
            size(),
        );
        worker.endpoint.0.set_port(8000 + id as u16);
        worker.event_sources = if id < count {
            vec![source()]
        } else {
            Vec::new()
        };
        worker
    };
    (1..=count).map(worker).collect()
}

/// A router with predictions of both kinds.
fn router(count: u64, seed: u64) -> Router {
    let load = LoadTracker::new(std::time::Instant::now);
    let predictor = || {
        let ttl = Ttl {
            ttl: Duration::from_secs(3600),
            most_blocks_per_rank: 1000,
        };
        Some(Predictor::new(Policy::Ttl(ttl), std::time::Instant::now))
    };
    let predictions = Predictions {
        without_events: predictor(),
        beside_events: predictor(),
        ..Predictions::default()
    };
    Router::new(PrefixIndex::new(), load, RouterSettings::default(), seed)
        .predicting(predictions)
        .with_fleet(count)
}

trait WithFleet {
    fn with_fleet(self, count: u64) -> Self;
}

impl WithFleet for Router {
    fn with_fleet(self, count: u64) -> Self {
        let change = self.fleet().reconcile(workers(count));
        for member in &change.added {
            self.load().open(member.slot, member.rank);
            self.predictions().open(member);
        }
        self.publish(Arc::new(change.fleet));
        self
    }
}

/// The same router without an index, whose predictions are kept for all.
fn remote_router(count: u64, seed: u64) -> Router {
    let bare = router(0, seed).without_index();
    bare.with_fleet(count)
}

fn hashes(locals: &[u64]) -> BlockHashes {
    BlockHashes::chain(
        locals.len() * 4 + 1,
        size(),
        locals.iter().copied().map(LocalHash).collect(),
    )
}

fn request(prompts: &[Vec<u64>]) -> RouteRequest {
    let prompts = prompts.iter().map(|locals| hashes(locals)).collect();
    RouteRequest::new(Some(MODEL.into()), Prompt::Hashed(prompts))
}

fn standing(number: u8) -> Standing {
    let (trust, because) = match number % 6 {
        0 | 1 => (Trust::Exact, None),
        2 => (Trust::Incomplete, Some(Because::UntoldBlocks)),
        3 => (Trust::CatchingUp, Some(Because::Replaying)),
        4 => (Trust::Stale, Some(Because::LostBatches)),
        _ => (Trust::Absent, Some(Because::BlockSizeMismatch)),
    };
    // An engine's blocks may be twice as large.
    let engine_block_size = (number % 4 == 3).then(|| BlockSize(NonZeroU32::new(8).unwrap()));
    Standing {
        trust,
        because,
        engine_block_size,
    }
}

/// What happens before a request.
#[derive(Clone, Debug)]
enum Step {
    Stored {
        id: u64,
        locals: Vec<u64>,
        tier: Tier,
    },
    Grouped {
        id: u64,
    },
    Cleared {
        id: u64,
    },
    Stands {
        id: u64,
        number: u8,
    },
    Asked {
        prompts: Vec<Vec<u64>>,
        sent: bool,
    },
}

const WORKERS: u64 = 4;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = prop_oneof![4 => Just(Tier::Device), 2 => Just(Tier::HostPinned), 1 => Just(Tier::External)];
    let step = prop_oneof![
        5 => (1..WORKERS, vec(0..2u64, 1..6), tier).prop_map(|(id, locals, tier)| Step::Stored { id, locals, tier }),
        1 => (1..WORKERS).prop_map(|id| Step::Grouped { id }),
        1 => (1..WORKERS).prop_map(|id| Step::Cleared { id }),
        2 => (1..WORKERS, any::<u8>()).prop_map(|(id, number)| Step::Stands { id, number }),
        6 => (vec(vec(0..2u64, 0..7), 1..3), any::<bool>()).prop_map(|(prompts, sent)| Step::Asked { prompts, sent }),
    ];
    vec(step, 1..40)
}

/// An engine names blocks by what they and all before them hold.
fn stored(locals: &[u64], tier: Tier) -> KvEvent {
    let names = hashes(locals);
    let blocks = names.locals().iter().zip(names.sequences());
    let blocks = blocks
        .map(|(local, name)| StoredBlock {
            engine: EngineHash(name.0),
            local: *local,
        })
        .collect();
    KvEvent::Stored {
        parent: None,
        blocks,
        tier,
    }
}

/// The answer as it comes over the wire.
fn over_the_wire(answer: &RemoteAnswer, asked: &[BlockHashes]) -> RemoteAnswer {
    let prompts: Vec<_> = answer
        .prompts
        .iter()
        .map(|found| wire::held(found))
        .collect();
    let ranks = wire::ranks(&wire::said(&answer.ranks)).unwrap();
    RemoteAnswer {
        ranks: Arc::new(ranks),
        prompts: wire::found(&prompts, asked).unwrap(),
    }
}

/// Everything that is told of a decision but how long it took.
fn told(route: &crate::router::Route) -> String {
    serde_json::to_string(route).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_router_with_an_answer_decides_as_the_router_with_that_index(steps in steps(), seed in any::<u64>()) {
        let (own, remote) = (router(WORKERS, seed), remote_router(WORKERS, seed));
        let join = |id: u64| own.index().join(own.fleet().slot(rank(id)).unwrap());
        let mut writers: Vec<RankWriter> = (1..WORKERS).map(join).collect();
        (1..WORKERS).for_each(|id| own.set_trust(rank(id), Standing::EXACT));
        let mut live = Vec::new();
        for step in steps {
            match step {
                Step::Stored { id, locals, tier } => _ = writers[id as usize - 1].apply(&stored(&locals, tier)),
                Step::Grouped { id } => {
                    let need = GroupNeed::Last { blocks: 1, stride: NonZeroU32::MIN };
                    writers[id as usize - 1].apply(&KvEvent::GroupStored { group: 1, need, blocks: Vec::new() });
                }
                Step::Cleared { id } => _ = writers[id as usize - 1].apply(&KvEvent::Cleared),
                Step::Stands { id, number } => own.set_trust(rank(id), standing(number)),
                Step::Asked { prompts, sent } => {
                    let asked = request(&prompts);
                    let answer = over_the_wire(&own.answer(asked.model.as_ref(), asked.prompt.blocks()), asked.prompt.blocks());
                    let mut there = asked.clone();
                    there.remote = Remote::Told(Arc::new(answer));
                    let explained = [own.explain(asked.clone()), remote.explain(there.clone())];
                    let [ours, theirs] = explained.map(|explained| serde_json::to_string(&explained).unwrap());
                    prop_assert_eq!(ours, theirs);
                    if sent {
                        let (ours, theirs) = (own.route(asked).unwrap(), remote.route(there).unwrap());
                        prop_assert_eq!(told(&ours.route), told(&theirs.route));
                        live.push((ours, theirs));
                    } else {
                        prop_assert_eq!(told(&own.ask(asked).unwrap()), told(&remote.ask(there).unwrap()));
                    }
                }
            }
        }
        prop_assert_eq!(own.load().snapshot(), remote.load().snapshot());
        prop_assert_eq!(remote.index().stats().distinct_blocks, 0);
    }
}

#[test]
fn without_an_answer_it_goes_by_what_was_routed_before() {
    let remote = remote_router(3, 1);
    let asked = || request(&[vec![1, 2, 3, 4]]);
    let mut first = remote.route(asked()).unwrap();
    assert_eq!(
        (first.route.mode, first.route.reason),
        (Mode::Approximate, Some(Reason::IndexAway))
    );
    assert_eq!(first.route.overlap, TierBlocks::default());
    let at = first.route.to.rank;
    remote.settle_predictions(&mut first, 200);
    drop(first);
    let again = remote.ask(asked()).unwrap();
    assert_eq!(
        (again.to.rank, again.overlap.device, again.mode),
        (at, 4, Mode::Approximate)
    );
    // The size of the engine's blocks holds on, and its standing does not.
    let standing = Standing {
        engine_block_size: BlockSize::new(12),
        ..Standing::EXACT
    };
    let rows = (1..=3)
        .map(|id| RemoteRank {
            rank: rank(id),
            standing,
            grouped: false,
        })
        .collect();
    let away = RouteRequest {
        remote: Remote::Away(Arc::new(RemoteRanks::new(rows))),
        ..asked()
    };
    let again = remote.ask(away).unwrap();
    assert_eq!(
        (again.to.rank, again.overlap.device, again.trust),
        (at, 3, Trust::Absent)
    );
    // An answer that somebody who is followed holds nothing outweighs what was routed, but for the time until its event.
    let rows = (1..=3)
        .map(|id| RemoteRank {
            rank: rank(id),
            standing: Standing::EXACT,
            grouped: true,
        })
        .collect();
    let answer = RemoteAnswer {
        ranks: Arc::new(RemoteRanks::new(rows)),
        prompts: vec![Vec::new()],
    };
    let told = remote
        .ask(RouteRequest {
            remote: Remote::Told(Arc::new(answer)),
            ..asked()
        })
        .unwrap();
    assert_eq!(
        (told.mode, told.reason, told.overlap.device),
        (Mode::Exact, None, 0)
    );
}

#[test]
fn without_predictions_it_goes_by_load() {
    let load = LoadTracker::new(std::time::Instant::now);
    let remote = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1)
        .without_index()
        .with_fleet(2);
    let route = remote.ask(request(&[vec![1, 2]])).unwrap();
    assert_eq!(
        (route.mode, route.reason),
        (Mode::LoadOnly, Some(Reason::IndexAway))
    );
}

#[test]
fn who_was_served_elsewhere_is_counted_by_the_same_answer() {
    let remote = remote_router(3, 1);
    let rows = (1..=3)
        .map(|id| RemoteRank {
            rank: rank(id),
            standing: Standing::EXACT,
            grouped: false,
        })
        .collect();
    let held = |id, device| {
        (
            rank(id),
            TierBlocks {
                device,
                ..TierBlocks::default()
            },
        )
    };
    let answer = RemoteAnswer {
        ranks: Arc::new(RemoteRanks::new(rows)),
        prompts: vec![vec![held(1, 4), held(2, 2)]],
    };
    let asked = RouteRequest {
        remote: Remote::Told(Arc::new(answer)),
        ..request(&[vec![1, 2, 3, 4]])
    };
    let mut booked = remote.route(asked).unwrap();
    assert_eq!(booked.route.to.rank, rank(1));
    assert_eq!(
        remote.served(&mut booked, "127.0.0.1:8002".parse().unwrap()),
        crate::router::Moved::To(rank(2))
    );
    let loads = remote.load().snapshot();
    let tokens = |id| {
        loads
            .iter()
            .find(|load| load.rank == rank(id))
            .unwrap()
            .active_prefill_tokens
    };
    assert_eq!((tokens(1), tokens(2)), (0, 17 - 8));
}

#[test]
fn what_makes_no_sense_is_named() {
    let prompt = |tokens, blocks| pb::Prompt {
        tokens,
        local_hashes: vec![7; blocks],
    };
    let read = |asked, most| wire::prompts(asked, size(), most).err();
    assert_eq!(read(vec![prompt(9, 2), prompt(3, 0)], 2), None);
    assert_eq!(
        read(vec![prompt(9, 2), prompt(9, 1)], 2),
        Some(wire::Nonsense::Blocks { blocks: 3, most: 2 })
    );
    assert_eq!(
        read(vec![prompt(7, 2)], 9),
        Some(wire::Nonsense::Tokens {
            blocks: 2,
            size: 4,
            tokens: 7
        })
    );
    assert_eq!(
        read(vec![prompt(1, 0); 1025], 9),
        Some(wire::Nonsense::Prompts(1025))
    );

    let asked = [hashes(&[1, 2, 3])];
    let held = pb::Held {
        worker_ids: vec![1, 2],
        device: vec![1, 0],
        host: vec![2, 1],
        ..pb::Held::default()
    };
    let found = wire::found(std::slice::from_ref(&held), &asked).unwrap();
    let blocks = |device, host| TierBlocks {
        device,
        host,
        ..TierBlocks::default()
    };
    assert_eq!(
        found,
        [vec![(rank(1), blocks(1, 2)), (rank(2), blocks(0, 1))]]
    );
    let wrong = |held: pb::Held| wire::found(&[held], &asked).err();
    assert_eq!(
        wire::found(&[], &asked).err(),
        Some(wire::Nonsense::Answers(0))
    );
    assert_eq!(
        wrong(pb::Held {
            disk: vec![1],
            ..held.clone()
        }),
        Some(wire::Nonsense::Columns)
    );
    assert_eq!(
        wrong(pb::Held {
            worker_ids: Vec::new(),
            ..held.clone()
        }),
        Some(wire::Nonsense::Columns)
    );
    assert_eq!(
        wrong(pb::Held {
            disk: vec![1, 0],
            ..held.clone()
        }),
        Some(wire::Nonsense::TooMuch)
    );
    assert_eq!(
        wrong(pb::Held {
            disk: vec![u32::MAX, 0],
            ..held
        }),
        Some(wire::Nonsense::TooMuch)
    );

    let ranks = |trust, because| {
        let said = pb::Rank {
            worker_id: 1,
            trust,
            because,
            ..pb::Rank::default()
        };
        wire::ranks(&pb::Ranks { ranks: vec![said] }).map(|ranks| ranks.rows()[0].standing)
    };
    assert_eq!(ranks(1, 0), Ok(Standing::EXACT));
    assert_eq!(ranks(0, 0), Err(wire::Nonsense::Word(0)));
    assert_eq!(ranks(6, 0), Err(wire::Nonsense::Word(6)));
    assert_eq!(ranks(4, 77), Err(wire::Nonsense::Word(77)));
}

#[test]
fn every_word_comes_back_as_it_was_said() {
    let because = [
        Because::NoSource,
        Because::Connecting,
        Because::Replaying,
        Because::Detached,
        Because::LostBatches,
        Because::UntoldBlocks,
        Because::Undecodable,
        Because::Silent,
        Because::BlockSizeMismatch,
        Because::OtherRank,
    ];
    let reasons = because.into_iter().map(Some).chain([None]);
    let all = reasons.flat_map(|because| Trust::ALL.map(|trust| (trust, because)));
    let row = |(at, (trust, because)): (usize, (Trust, Option<Because>))| {
        let engine_block_size = BlockSize::new(at as u32 % 3);
        let rank = WorkerRank {
            worker: WorkerId(u64::MAX - at as u64),
            rank: DpRank(at as u32),
        };
        RemoteRank {
            rank,
            standing: Standing {
                trust,
                because,
                engine_block_size,
            },
            grouped: at % 2 == 0,
        }
    };
    let ranks = RemoteRanks::new(all.enumerate().map(row).collect());
    assert_eq!(ranks.rows().len(), 55);
    assert_eq!(
        wire::ranks(&wire::said(&ranks)).unwrap().rows(),
        ranks.rows()
    );
}

/// A server of an index in which worker 1 holds three blocks.
struct Site {
    router: Arc<Router>,
    readiness: Readiness,
    url: String,
    _writer: RankWriter,
}

impl Site {
    async fn start() -> Self {
        let router = Arc::new(router(3, 1));
        let mut writer = router.index().join(router.fleet().slot(rank(1)).unwrap());
        writer.apply(&stored(&[1, 2, 3], Tier::Device));
        router.set_trust(rank(1), Standing::EXACT);
        let readiness = Readiness::default();
        let find = |name: Option<&str>| {
            let found = ServedModel {
                name: MODEL.into(),
                block_size: size(),
                hashing: HASHING,
            };
            Some(found).filter(|_| name.is_none_or(|name| name == MODEL))
        };
        let parts = Parts {
            router: router.clone(),
            find: Box::new(find),
            readiness: readiness.clone(),
            metrics: Arc::new(Metrics::new()),
            most_blocks: 100,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serving = Server::builder().add_service(ServedIndex::new(parts).server());
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        Self {
            router,
            readiness,
            url,
            _writer: writer,
        }
    }
}

/// Somebody who takes connections and says nothing.
async fn silent() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut kept: Vec<TcpStream> = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            kept.push(connection);
        }
    });
    url
}

/// Somebody who asks these, with more patience than anything here takes.
fn asker(servers: &[&str]) -> (Asker, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::new());
    let servers = servers.iter().map(|url| (*url).to_owned());
    let settings = RemoteIndexConfig {
        deadline: Period::seconds(30),
        ..RemoteIndexConfig::of(servers)
    };
    (Asker::new(&settings, metrics.clone()).unwrap(), metrics)
}

async fn ask(asker: &Asker, hashing: u64, locals: &[u64]) -> Remote {
    let model = ModelName::from(MODEL);
    asker
        .ask(Question {
            model: Some(&model),
            hashing,
            prompts: &[hashes(locals)],
        })
        .await
}

fn answer(remote: Remote) -> Arc<RemoteAnswer> {
    match remote {
        Remote::Told(answer) => answer,
        other => panic!("{other:?}"),
    }
}

fn outcome(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .remote_index_questions
        .get_or_create(&OutcomeLabel { outcome })
        .get()
}

#[tokio::test]
async fn ranks_are_told_when_they_are_news() {
    let site = Site::start().await;
    let (asker, metrics) = asker(&[&site.url]);
    let first = answer(ask(&asker, HASHING, &[1, 2, 9]).await);
    assert_eq!(
        first.prompts,
        [vec![(
            rank(1),
            TierBlocks {
                device: 2,
                ..TierBlocks::default()
            }
        )]]
    );
    assert_eq!(
        first.ranks.rows(),
        [RemoteRank {
            rank: rank(1),
            standing: Standing::EXACT,
            grouped: false
        }]
    );
    let second = answer(ask(&asker, HASHING, &[]).await);
    assert!(
        Arc::ptr_eq(&first.ranks, &second.ranks),
        "they were not told again"
    );
    assert_eq!(second.prompts, [Vec::new()]);
    site.router.set_trust(rank(2), standing(4));
    let third = answer(ask(&asker, HASHING, &[1]).await);
    assert_eq!(third.ranks.rows()[1].standing, standing(4));
    site.router.set_trust(rank(2), Standing::default());
    assert_eq!(
        answer(ask(&asker, HASHING, &[1]).await).ranks.rows(),
        first.ranks.rows()
    );
    assert_eq!(outcome(&metrics, "answered"), 4);
}

#[tokio::test]
async fn other_blocks_are_refused_and_never_answered() {
    let site = Site::start().await;
    let (asker, metrics) = asker(&[&site.url]);
    assert!(
        matches!(ask(&asker, HASHING + 1, &[1, 2]).await, Remote::Away(_)),
        "hashed in another way"
    );
    let model = ModelName::from(MODEL);
    let other = [BlockHashes::chain(
        16,
        BlockSize::new(8).unwrap(),
        vec![LocalHash(1), LocalHash(2)],
    )];
    let question = Question {
        model: Some(&model),
        hashing: HASHING,
        prompts: &other,
    };
    assert!(
        matches!(asker.ask(question).await, Remote::Away(_)),
        "blocks of another size"
    );
    let stranger = ModelName::from("stranger");
    let question = Question {
        model: Some(&stranger),
        hashing: HASHING,
        prompts: &[hashes(&[1])],
    };
    assert!(
        matches!(asker.ask(question).await, Remote::Away(_)),
        "another model"
    );
    assert!(
        matches!(ask(&asker, HASHING, &[1; 101]).await, Remote::Away(_)),
        "too long"
    );
    assert_eq!(outcome(&metrics, "refused"), 4);
    answer(ask(&asker, HASHING, &[1; 100]).await);
    assert_eq!(
        asker.shown()[0]["asked"],
        true,
        "who refuses is not left out"
    );
}

#[tokio::test]
async fn who_is_starting_or_leaving_is_not_believed_and_another_one_is_asked_at_once() {
    let (site, other) = (Site::start().await, Site::start().await);
    let pending = site.readiness.wait_for("something");
    let (asker, metrics) = asker(&[&site.url, &other.url]);
    for _ in 0..4 {
        answer(ask(&asker, HASHING, &[1]).await);
    }
    assert_eq!(
        (
            asker.shown()[0]["asked"].clone(),
            outcome(&metrics, "answered")
        ),
        (false.into(), 4)
    );
    other.readiness.drain();
    assert!(matches!(ask(&asker, HASHING, &[1]).await, Remote::Away(_)));
    assert_eq!(outcome(&metrics, "failed"), 1);
    assert!(matches!(ask(&asker, HASHING, &[1]).await, Remote::Away(_)));
    assert_eq!(outcome(&metrics, "out"), 1);
    // Somebody tries it again now and then.
    let comes_back = async {
        while !matches!(ask(&asker, HASHING, &[1]).await, Remote::Told(_)) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = asker.keep() => match never {},
        () = tokio::time::sleep(Duration::from_millis(1500)) => {}
        () = comes_back => panic!("nobody is ready"),
    }
    drop(pending);
    let comes_back = async {
        while !matches!(ask(&asker, HASHING, &[1]).await, Remote::Told(_)) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = asker.keep() => match never {},
        () = tokio::time::sleep(Duration::from_secs(30)) => panic!("it does not come back"),
        () = comes_back => {}
    }
    assert_eq!(
        (
            asker.shown()[0]["asked"].clone(),
            asker.shown()[1]["asked"].clone()
        ),
        (true.into(), false.into())
    );
}

#[tokio::test]
async fn a_question_that_is_too_long_for_a_message_says_nothing_of_the_servers() {
    let site = Site::start().await;
    let (asker, metrics) = asker(&[&site.url]);
    let long: Vec<u64> = (0..20_000).collect();
    assert!(matches!(ask(&asker, HASHING, &long).await, Remote::Away(_)));
    let model = ModelName::from(MODEL);
    let many: Vec<BlockHashes> = (0..65).map(|local| hashes(&[local])).collect();
    let question = Question {
        model: Some(&model),
        hashing: HASHING,
        prompts: &many,
    };
    assert!(matches!(asker.ask(question).await, Remote::Away(_)));
    assert_eq!(outcome(&metrics, "refused"), 2);
    answer(ask(&asker, HASHING, &[1]).await);
}

#[tokio::test]
async fn who_says_nothing_costs_a_hedge_and_then_nothing() {
    let (site, mute) = (Site::start().await, silent().await);
    let (asker, metrics) = asker(&[&mute, &site.url]);
    for _ in 0..40 {
        answer(ask(&asker, HASHING, &[1]).await);
    }
    assert_eq!(asker.shown()[0]["asked"], false);
    let (hedged, answered) = (
        outcome(&metrics, "hedged_won"),
        outcome(&metrics, "answered"),
    );
    assert!(
        hedged >= 3 && hedged + answered == 40,
        "{hedged} {answered}"
    );
}

#[tokio::test]
async fn nobody_waits_beyond_the_deadline_and_no_more_ask_than_may() {
    let mute = silent().await;
    let metrics = Arc::new(Metrics::new());
    let settings = RemoteIndexConfig {
        in_flight: 1,
        ..RemoteIndexConfig::of([mute])
    };
    let asker = Asker::new(&settings, metrics.clone()).unwrap();
    let (late, busy) = tokio::join!(ask(&asker, HASHING, &[1]), ask(&asker, HASHING, &[1]));
    assert!(matches!((late, busy), (Remote::Away(_), Remote::Away(_))));
    assert_eq!(
        (outcome(&metrics, "late"), outcome(&metrics, "busy")),
        (1, 1)
    );
    for _ in 0..2 {
        ask(&asker, HASHING, &[1]).await;
    }
    assert_eq!(
        (outcome(&metrics, "late"), asker.shown()[0]["asked"].clone()),
        (3, false.into())
    );
    ask(&asker, HASHING, &[1]).await;
    assert_eq!(outcome(&metrics, "out"), 1);
}

#[tokio::test]
async fn a_request_that_leaves_takes_its_question_back() {
    let mute = silent().await;
    let (asker, _) = asker(&[&mute]);
    for _ in 0..10 {
        let gone = tokio::time::timeout(Duration::from_millis(5), ask(&asker, HASHING, &[1])).await;
        assert!(gone.is_err());
    }
    assert_eq!(
        asker.shown()[0]["asked"],
        true,
        "that says nothing of the server"
    );
    assert_eq!(
        asker.permits.available_permits(),
        RemoteIndexConfig::of([]).in_flight as usize
    );
}
