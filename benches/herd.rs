//! What it costs that several replicas choose at once: the same trace, the same workers, and one or more routers that hear
//! of each other's bookings after a delay, or never. Time is simulated, so nothing here depends on the machine, and the
//! choices are those of the real router. One replica is the measure; a choice is stale where somebody who knew everything
//! would have found a cheaper rank, and a duplicate where that is because another replica was quicker there.
//!
//! `cargo bench --bench herd -- [--trace FILE.jsonl.gz] [--workers N] [--rate REQUESTS_PER_SECOND]`

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a program that measures"
)]

use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use flate2::read::GzDecoder;
use parking_lot::Mutex;
use serde::Deserialize;
use warmroute::block::{BlockHashes, EngineHash, LocalHash};
use warmroute::fleet::Fleet;
use warmroute::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock};
use warmroute::load::{BookingId, Live, LoadTracker, News, Reservation, Until};
use warmroute::router::{Booked, Prompt, RouteRequest, Router, RouterSettings};
use warmroute::schedule::Unheard;
use warmroute::tier::Tier;
use warmroute::trust::Standing;
use warmroute::worker::{BlockSize, Endpoint, Worker, WorkerId};

/// What a trace calls a block.
const BLOCK: usize = 512;
/// How busy the workers' prefills are with one replica.
const BUSY: f64 = 0.75;
/// From one token of an answer to the next.
const TOKEN: f64 = 0.02;

#[derive(Parser)]
struct Args {
    /// A trace of Mooncake's kind; a made-up one where left out.
    #[arg(long)]
    trace: Option<PathBuf>,
    #[arg(long, default_value_t = 32)]
    workers: u64,
    /// The trace is played so fast that so many requests come in a second.
    #[arg(long, default_value_t = 400.0)]
    rate: f64,
    /// Requests of the trace that are used.
    #[arg(long, default_value_t = 12_000)]
    requests: usize,
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: usize,
    output_length: u64,
    hash_ids: Vec<u64>,
}

struct Request {
    at: f64,
    prompt: BlockHashes,
    tokens: usize,
    output: u64,
}

fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

fn requests(args: &Args) -> Vec<Request> {
    let mut lines: Vec<Line> = match &args.trace {
        Some(file) => {
            let lines = BufReader::new(GzDecoder::new(File::open(file).unwrap())).lines();
            lines
                .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
                .collect()
        }
        None => made_up(),
    };
    lines.sort_by_key(|line| line.timestamp);
    lines.truncate(args.requests);
    let (first, last) = (lines[0].timestamp, lines.last().unwrap().timestamp);
    // The trace tells time in coarse steps, and many requests of one step; within it they are spread evenly.
    let mut steps: BTreeMap<u64, usize> = BTreeMap::new();
    lines
        .iter()
        .for_each(|line| *steps.entry(line.timestamp).or_default() += 1);
    let span = (last - first).max(1) as f64;
    let scale = lines.len() as f64 / args.rate / span;
    let width = span / steps.len() as f64;
    let mut seen: HashMap<u64, usize> = HashMap::new();
    lines
        .iter()
        .map(|line| {
            let nth = seen.entry(line.timestamp).or_default();
            let within = width * *nth as f64 / steps[&line.timestamp] as f64;
            *nth += 1;
            let blocks = (line.input_length / BLOCK).min(line.hash_ids.len());
            let locals = line.hash_ids[..blocks]
                .iter()
                .map(|id| LocalHash(mix(*id + 1)))
                .collect();
            let tokens = line.input_length.max(1);
            let size = BlockSize::new(BLOCK as u32).unwrap();
            let prompt = BlockHashes::chain(tokens, size, locals);
            Request {
                at: ((line.timestamp - first) as f64 + within) * scale,
                prompt,
                tokens,
                output: line.output_length,
            }
        })
        .collect()
}

/// Conversations, some with a shared system prompt.
fn made_up() -> Vec<Line> {
    let mut lines = Vec::new();
    for chat in 0..2_000_u64 {
        let mut ids: Vec<u64> = (0..4).map(|at| (mix(chat) % 16) * 4 + at).collect();
        for turn in 0..1 + mix(chat) % 12 {
            let draw = mix(chat << 8 | turn);
            ids.extend((0..1 + draw % 12).map(|at| 1_000 + chat * 1_000 + turn * 20 + at));
            lines.push(Line {
                timestamp: chat * 150 + turn * (20_000 + draw % 20_000),
                input_length: ids.len() * BLOCK + (draw % 500) as usize,
                output_length: 50 + draw % 700,
                hash_ids: ids.clone(),
            });
        }
    }
    lines
}

/// How replicas hear of each other.
#[derive(Clone, Copy)]
enum Words {
    /// After so many seconds.
    After(f64),
    /// After so many seconds, and what is under way is reckoned with.
    Expected(f64),
    Never,
}

/// One router, and what it has heard of the others.
struct Replica {
    router: Router,
    news: Arc<Mutex<Vec<News>>>,
    others: HashMap<(usize, BookingId), Reservation>,
}

/// What happens.
enum Event {
    Arrival(usize),
    Hear { at: usize, from: usize, news: News },
    Prefilled(usize),
    Ended(usize),
}

/// In the order of time, and of their making.
struct Due {
    at: f64,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other
            .at
            .total_cmp(&self.at)
            .then(other.number.cmp(&self.number))
    }
}

/// The simulation.
struct World<'t> {
    requests: &'t [Request],
    words: Words,
    /// Tokens in a second.
    prefill_rate: f64,
    replicas: Vec<Replica>,
    /// Knows everything at once.
    oracle: Replica,
    writers: Vec<RankWriter>,
    cached: Vec<HashSet<u64>>,
    busy_until: Vec<f64>,
    clock: Arc<Mutex<f64>>,
    due: BinaryHeap<Due>,
    numbers: u64,
    running: HashMap<usize, (usize, usize, Booked)>,
    /// Where others have booked what a replica has not heard of, by replica and worker.
    unheard: HashMap<(usize, usize), i64>,
    result: Sums,
}

/// What came of it.
#[derive(Default)]
struct Sums {
    choices: u64,
    stale: u64,
    duplicates: u64,
    regret: f64,
    cached: u64,
    computed: u64,
    waits: Vec<f64>,
    /// Of the ranks' unfinished prefills at each choice: deviation over mean.
    spread: f64,
    spreads: u64,
}

fn replica(index: &Arc<PrefixIndex>, workers: u64, clock: &Arc<Mutex<f64>>, seed: u64) -> Replica {
    let (start, now) = (Instant::now(), clock.clone());
    let load = LoadTracker::new(move || start + Duration::from_secs_f64(*now.lock()));
    let settings = RouterSettings {
        scores: true,
        ..RouterSettings::default()
    };
    let router = Router::new(index.clone(), load.clone(), settings, seed);
    let size = BlockSize::new(BLOCK as u32).unwrap();
    let worker = |id: u64| {
        Worker::new(
            WorkerId(id),
            Endpoint(([10, 0, (id >> 8) as u8, id as u8], 8000).into()),
            "m".into(),
            size,
        )
    };
    let change = Fleet::empty().reconcile((0..workers).map(worker).collect());
    for member in &change.added {
        load.open(member.slot, member.rank);
        router.set_trust(member.rank, Standing::EXACT);
    }
    router.publish(Arc::new(change.fleet));
    let news = Arc::<Mutex<Vec<News>>>::default();
    let heard = news.clone();
    load.on_news(move |news| heard.lock().push(news));
    Replica {
        router,
        news,
        others: HashMap::new(),
    }
}

impl Replica {
    fn hear(&mut self, from: usize, news: News) {
        match news {
            News::Booked { id, bookings } => {
                let held = self.router.load().mirror(&Live::new(bookings)).unwrap();
                self.others.insert((from, id), held);
            }
            News::FirstToken(id) => _ = self.others.get_mut(&(from, id)).unwrap().first_token(),
            News::Released(id) => drop(self.others.remove(&(from, id))),
            News::OutputBlocks { .. } | News::Moved { .. } => {}
        }
    }
}

impl<'t> World<'t> {
    fn new(
        requests: &'t [Request],
        args: &Args,
        replicas: usize,
        words: Words,
        prefill_rate: f64,
    ) -> Self {
        let (index, clock) = (PrefixIndex::new(), Arc::new(Mutex::new(0.0)));
        let all = (0..replicas)
            .map(|at| replica(&index, args.workers, &clock, at as u64 + 1))
            .collect();
        let oracle = replica(&index, args.workers, &clock, 99);
        let writers = oracle
            .router
            .fleet()
            .members()
            .map(|member| index.join(member.slot))
            .collect();
        let workers = args.workers as usize;
        let mut world = Self {
            requests,
            words,
            prefill_rate,
            replicas: all,
            oracle,
            writers,
            cached: vec![HashSet::new(); workers],
            busy_until: vec![0.0; workers],
            clock,
            due: BinaryHeap::new(),
            numbers: 0,
            running: HashMap::new(),
            unheard: HashMap::new(),
            result: Sums::default(),
        };
        (0..requests.len()).for_each(|at| world.plan(requests[at].at, Event::Arrival(at)));
        world
    }

    fn plan(&mut self, at: f64, event: Event) {
        self.numbers += 1;
        self.due.push(Due {
            at,
            number: self.numbers,
            event,
        });
    }

    fn run(mut self) -> Sums {
        while let Some(Due { at: now, event, .. }) = self.due.pop() {
            *self.clock.lock() = now;
            match event {
                Event::Arrival(request) => self.arrive(request, now),
                Event::Hear { at, from, news } => {
                    if let News::Booked { bookings, .. } = &news {
                        *self
                            .unheard
                            .entry((at, bookings[0].rank.worker.0 as usize))
                            .or_default() -= 1;
                    }
                    self.replicas[at].hear(from, news);
                }
                Event::Prefilled(request) => {
                    let (at, worker, booked) = self.running.get_mut(&request).unwrap();
                    let (at, worker) = (*at, *worker);
                    booked.reservation.first_token();
                    self.store(request, worker);
                    self.tell(at, now);
                }
                Event::Ended(request) => {
                    let (at, _, booked) = self.running.remove(&request).unwrap();
                    drop(booked);
                    self.tell(at, now);
                }
            }
        }
        self.result
    }

    fn arrive(&mut self, number: usize, now: f64) {
        let request = &self.requests[number];
        let at = number % self.replicas.len();
        let asked = || {
            RouteRequest::new(
                Some("m".into()),
                Prompt::Hashed(vec![request.prompt.clone()]),
            )
        };
        let truth = self.oracle.router.ask(asked()).unwrap();
        self.reckon(at);
        let booked = self.replicas[at].router.route(asked()).unwrap();
        let worker = booked.route.to.rank.worker.0 as usize;
        let cost = truth
            .scores
            .iter()
            .find(|(endpoint, _)| *endpoint == booked.route.to.endpoint)
            .unwrap()
            .1;
        let least = truth
            .scores
            .iter()
            .map(|(_, cost)| *cost)
            .fold(f64::INFINITY, f64::min);
        let sums = &mut self.result;
        sums.choices += 1;
        sums.regret += cost - least;
        if cost > least + 1e-9 {
            sums.stale += 1;
            sums.duplicates += u64::from(
                self.unheard
                    .get(&(at, worker))
                    .is_some_and(|count| *count > 0),
            );
        }
        let loads: Vec<f64> = self
            .oracle
            .router
            .load()
            .snapshot()
            .iter()
            .map(|load| load.active_prefill_tokens as f64)
            .collect();
        let mean = loads.iter().sum::<f64>() / loads.len() as f64;
        if mean > 0.0 {
            let variance =
                loads.iter().map(|load| (load - mean).powi(2)).sum::<f64>() / loads.len() as f64;
            sums.spread += variance.sqrt() / mean;
            sums.spreads += 1;
        }
        let known = &self.cached[worker];
        let hits = request
            .prompt
            .sequences()
            .iter()
            .take_while(|hash| known.contains(&hash.0))
            .count();
        let uncached = request.tokens - hits * BLOCK;
        sums.cached += (hits * BLOCK) as u64;
        sums.computed += uncached as u64;
        let done = self.busy_until[worker].max(now) + uncached as f64 / self.prefill_rate;
        self.busy_until[worker] = done;
        sums.waits.push(done - now);
        let end = done + request.output as f64 * TOKEN;
        self.plan(done, Event::Prefilled(number));
        self.plan(end, Event::Ended(number));
        self.running.insert(number, (at, worker, booked));
        self.tell(at, now);
    }

    /// What is under way to a replica, from what there has been so far.
    fn reckon(&self, at: usize) {
        let (Words::Expected(delay), sums) = (self.words, &self.result) else {
            return;
        };
        let others = (self.replicas.len() - 1) as f64 / self.replicas.len() as f64;
        let rate = self.requests.len() as f64 / self.requests.last().map_or(1.0, |last| last.at);
        let each = |sum: u64| sum / sums.choices.max(1);
        let unheard = Unheard {
            bookings: rate * others * delay,
            prefill_tokens: each(sums.computed),
            blocks: each(sums.computed + sums.cached) / BLOCK as u64,
            ranks: self.cached.len(),
        };
        self.replicas[at]
            .router
            .expect_unheard(HashMap::from([(("m".into(), Until::End), unheard)]));
    }

    /// Everybody reads the engines' events, at the same time.
    fn store(&mut self, number: usize, worker: usize) {
        let prompt = &self.requests[number].prompt;
        let blocks = prompt.locals().iter().zip(prompt.sequences());
        let blocks = blocks
            .map(|(&local, hash)| StoredBlock {
                engine: EngineHash(hash.0),
                local,
            })
            .collect();
        self.writers[worker].apply(&KvEvent::Stored {
            parent: None,
            blocks,
            tier: Tier::Device,
        });
        self.cached[worker].extend(prompt.sequences().iter().map(|hash| hash.0));
    }

    fn tell(&mut self, from: usize, now: f64) {
        let told = std::mem::take(&mut *self.replicas[from].news.lock());
        for news in told {
            self.oracle.hear(from, news.clone());
            let others: Vec<usize> = (0..self.replicas.len()).filter(|at| *at != from).collect();
            for at in others {
                if let News::Booked { bookings, .. } = &news {
                    *self
                        .unheard
                        .entry((at, bookings[0].rank.worker.0 as usize))
                        .or_default() += 1;
                }
                if let Words::After(delay) | Words::Expected(delay) = self.words {
                    self.plan(
                        now + delay,
                        Event::Hear {
                            at,
                            from,
                            news: news.clone(),
                        },
                    );
                }
            }
        }
    }
}

impl Sums {
    fn row(&mut self, replicas: usize, words: Words) {
        self.waits.sort_by(f64::total_cmp);
        let quantile = |q: f64| self.waits[((self.waits.len() - 1) as f64 * q) as usize] * 1e3;
        let words = match words {
            _ if replicas == 1 => "-".to_owned(),
            Words::After(seconds) => format!("{} ms", seconds * 1e3),
            Words::Expected(seconds) => format!("{} ms, reckoned with", seconds * 1e3),
            Words::Never => "never".to_owned(),
        };
        let of = |count: u64| 100.0 * count as f64 / self.choices as f64;
        println!(
            "| {replicas} | {words} | {:.2} | {:.2} | {:.3} | {:.2} | {:.1} | {:.0} | {:.0} |",
            of(self.stale),
            of(self.duplicates),
            self.regret / self.choices as f64,
            self.spread / self.spreads.max(1) as f64,
            100.0 * self.cached as f64 / (self.cached + self.computed) as f64,
            quantile(0.5),
            quantile(0.99),
        );
    }
}

fn main() {
    let args = Args::parse();
    let requests = requests(&args);
    let span = requests.last().unwrap().at;
    let all: usize = requests.iter().map(|request| request.tokens).sum();
    let rate = |computed: f64| computed / (span * args.workers as f64 * BUSY);
    // What there is to compute depends on the choices, and these on how fast it is computed.
    let mut prefill_rate = rate(all as f64 * 0.7);
    for _ in 0..3 {
        let sums = World::new(&requests, &args, 1, Words::Never, prefill_rate).run();
        prefill_rate = rate(sums.computed as f64);
    }
    println!(
        "{} requests in {span:.0} s, {} workers of {prefill_rate:.0} prompt tokens/s each\n",
        requests.len(),
        args.workers
    );
    println!(
        "| replicas | words after | stale, % | duplicates, % | regret, blocks | imbalance | hit rate, % | p50, ms | p99, ms |"
    );
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let after = [0.0, 0.002, 0.005, 0.02, 0.1];
    let words = after
        .into_iter()
        .flat_map(|after| [Words::After(after), Words::Expected(after)]);
    let words: Vec<Words> = words.skip(1).chain([Words::Never]).collect();
    let mut cases = vec![(1, Words::Never)];
    cases.extend(
        [2, 3, 8]
            .into_iter()
            .flat_map(|replicas| words.iter().map(move |words| (replicas, *words))),
    );
    for (replicas, words) in cases {
        World::new(&requests, &args, replicas, words, prefill_rate)
            .run()
            .row(replicas, words);
    }
}
