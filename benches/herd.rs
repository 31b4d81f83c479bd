//! Cost of concurrent decisions by several replicas. The same trace and workers are simulated with
//! one or more routers, which receive each other's bookings after a delay, or never. Time is
//! simulated, so the results do not depend on the machine, and the decisions are those of the real
//! router. One replica is the reference. A choice is stale if a router with complete knowledge
//! would have found a cheaper rank. It is a duplicate if the chosen worker has a booking of another
//! replica that was not received yet.
//!
//! `cargo bench --bench herd -- [--trace FILE.jsonl.gz] [--workers N] [--rate REQUESTS_PER_SECOND]`

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a bench prints its results and panics on a failure"
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
use warmroute_core::block::{BlockHashes, EngineHash, LocalHash, StorageTier};
use warmroute_core::fleet::Fleet;
use warmroute_core::freshness::SourceStatus;
use warmroute_core::index::{KvEvent, PrefixIndex, RankWriter, StoredBlock};
use warmroute_core::load::{
    BookingEnd, BookingId, LoadListener, LoadTracker, Reservation, ReservationEvent,
    ReservationState,
};
use warmroute_core::policy::InFlightEstimate;
use warmroute_core::router::{Placement, RoutePrompt, RouteRequest, Router, RouterSettings};
use warmroute_core::worker::{BlockSize, Worker, WorkerEndpoint, WorkerId};

/// Tokens of a trace block.
const BLOCK: usize = 512;
/// Utilization of the workers' prefills with one replica.
const BUSY: f64 = 0.75;
/// Seconds per decoded token.
const TOKEN: f64 = 0.02;

#[derive(Parser)]
struct HerdArgs {
    /// A trace in Mooncake's format; synthetic if omitted.
    #[arg(long)]
    trace: Option<PathBuf>,
    #[arg(long, default_value_t = 32)]
    workers: u64,
    /// Requests per second to which the trace is scaled.
    #[arg(long, default_value_t = 400.0)]
    rate: f64,
    /// Number of requests of the trace to use.
    #[arg(long, default_value_t = 12_000)]
    requests: usize,
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Deserialize)]
struct HerdTraceLine {
    timestamp: u64,
    input_length: usize,
    output_length: u64,
    hash_ids: Vec<u64>,
}

struct HerdRequest {
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

fn requests(args: &HerdArgs) -> Vec<HerdRequest> {
    let mut lines: Vec<HerdTraceLine> = match &args.trace {
        Some(file) => {
            let lines = BufReader::new(GzDecoder::new(File::open(file).unwrap())).lines();
            lines
                .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
                .collect()
        }
        None => synthetic_trace(),
    };
    lines.sort_by_key(|line| line.timestamp);
    lines.truncate(args.requests);
    let first = lines[0].timestamp;
    let last = lines.last().unwrap().timestamp;
    // The trace has coarse timestamps with many requests each, so these requests are spread evenly.
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
            let prompt = BlockHashes::from_locals(tokens, size, locals);
            HerdRequest {
                at: ((line.timestamp - first) as f64 + within) * scale,
                prompt,
                tokens,
                output: line.output_length,
            }
        })
        .collect()
}

/// Generates conversations, some with a shared system prompt.
fn synthetic_trace() -> Vec<HerdTraceLine> {
    let mut lines = Vec::new();
    for chat in 0..2_000_u64 {
        let mut ids: Vec<u64> = (0..4).map(|at| (mix(chat) % 16) * 4 + at).collect();
        for turn in 0..1 + mix(chat) % 12 {
            let draw = mix(chat << 8 | turn);
            ids.extend((0..1 + draw % 12).map(|at| 1_000 + chat * 1_000 + turn * 20 + at));
            lines.push(HerdTraceLine {
                timestamp: chat * 150 + turn * (20_000 + draw % 20_000),
                input_length: ids.len() * BLOCK + (draw % 500) as usize,
                output_length: 50 + draw % 700,
                hash_ids: ids.clone(),
            });
        }
    }
    lines
}

/// Propagation of bookings between replicas.
#[derive(Clone, Copy)]
enum BookingSync {
    /// After this many seconds.
    After(f64),
    /// After this many seconds, with an estimate of the bookings in flight.
    Expected(f64),
    Never,
}

/// One router, with the bookings of the other routers that it has received.
struct SimReplica {
    router: Router,
    events: Arc<Mutex<Vec<ReservationEvent>>>,
    others: HashMap<(usize, BookingId), Reservation>,
}

/// An event of the simulation.
enum SimEvent {
    Arrival(usize),
    BookingReceived {
        at: usize,
        from: usize,
        event: ReservationEvent,
    },
    Prefilled(usize),
    Ended(usize),
}

/// An event with its time. Ties are resolved by creation order.
struct ScheduledEvent {
    at: f64,
    number: u64,
    event: SimEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other
            .at
            .total_cmp(&self.at)
            .then(other.number.cmp(&self.number))
    }
}

/// A placed request that has not ended.
struct RunningRequest {
    replica: usize,
    worker: usize,
    placement: Placement,
}

/// The simulation.
struct HerdSimulation<'t> {
    requests: &'t [HerdRequest],
    sync: BookingSync,
    /// Prefill tokens per second.
    prefill_rate: f64,
    replicas: Vec<SimReplica>,
    /// The reference router with complete knowledge.
    oracle: SimReplica,
    writers: Vec<RankWriter>,
    cached: Vec<HashSet<u64>>,
    busy_until: Vec<f64>,
    clock: Arc<Mutex<f64>>,
    schedule: BinaryHeap<ScheduledEvent>,
    numbers: u64,
    running: HashMap<usize, RunningRequest>,
    /// Bookings that a replica has not received yet, by replica and worker.
    in_flight: HashMap<(usize, usize), i64>,
    result: HerdTotals,
}

/// Totals of the results.
#[derive(Default)]
struct HerdTotals {
    choices: u64,
    stale: u64,
    duplicates: u64,
    regret: f64,
    cached: u64,
    computed: u64,
    waits: Vec<f64>,
    /// Sum of the spreads of the ranks' unfinished prefills at each choice. A spread is the
    /// deviation divided by the mean.
    spread: f64,
    spreads: u64,
}

fn replica(
    index: &Arc<PrefixIndex>,
    workers: u64,
    clock: &Arc<Mutex<f64>>,
    seed: u64,
) -> SimReplica {
    let start = Instant::now();
    let now = clock.clone();
    let events = Arc::<Mutex<Vec<ReservationEvent>>>::default();
    let log = Arc::new(EventLog(events.clone()));
    let load =
        LoadTracker::with_listener(move || start + Duration::from_secs_f64(*now.lock()), log);
    let settings = RouterSettings {
        reports_scores: true,
        ..RouterSettings::default()
    };
    let router = Router::new(index.clone(), load.clone(), settings, seed);
    let size = BlockSize::new(BLOCK as u32).unwrap();
    let worker = |id: u64| {
        Worker::new(
            WorkerId(id),
            WorkerEndpoint(([10, 0, (id >> 8) as u8, id as u8], 8000).into()),
            "m".into(),
            size,
        )
    };
    let change = Fleet::empty().reconcile((0..workers).map(worker).collect());
    for member in &change.added {
        load.join(member);
        router.set_source_status(member.rank, SourceStatus::EXACT);
    }
    router.set_fleet(Arc::new(change.fleet));
    SimReplica {
        router,
        events,
        others: HashMap::new(),
    }
}

/// Records the changes of reservations.
struct EventLog(Arc<Mutex<Vec<ReservationEvent>>>);

impl LoadListener for EventLog {
    fn wants_reservation_events(&self) -> bool {
        true
    }

    fn on_reservation_event(&self, event: ReservationEvent) {
        self.0.lock().push(event);
    }
}

impl SimReplica {
    fn apply(&mut self, from: usize, event: ReservationEvent) {
        match event {
            ReservationEvent::Booked { id, bookings } => {
                let reservation = self
                    .router
                    .load()
                    .mirror(&ReservationState::new(bookings))
                    .unwrap();
                self.others.insert((from, id), reservation);
            }
            ReservationEvent::FirstToken(id) => {
                _ = self.others.get_mut(&(from, id)).unwrap().on_first_token()
            }
            ReservationEvent::Released(id) => drop(self.others.remove(&(from, id))),
            ReservationEvent::OutputBlocks { .. } | ReservationEvent::Moved { .. } => {}
        }
    }
}

impl<'t> HerdSimulation<'t> {
    fn new(
        requests: &'t [HerdRequest],
        args: &HerdArgs,
        replicas: usize,
        sync: BookingSync,
        prefill_rate: f64,
    ) -> Self {
        let index = PrefixIndex::new();
        let clock = Arc::new(Mutex::new(0.0));
        let all = (0..replicas)
            .map(|at| replica(&index, args.workers, &clock, at as u64 + 1))
            .collect();
        let oracle = replica(&index, args.workers, &clock, 99);
        let writers = oracle
            .router
            .fleet()
            .members()
            .map(|member| index.create_writer(member.slot))
            .collect();
        let workers = args.workers as usize;
        let mut simulation = Self {
            requests,
            sync,
            prefill_rate,
            replicas: all,
            oracle,
            writers,
            cached: vec![HashSet::new(); workers],
            busy_until: vec![0.0; workers],
            clock,
            schedule: BinaryHeap::new(),
            numbers: 0,
            running: HashMap::new(),
            in_flight: HashMap::new(),
            result: HerdTotals::default(),
        };
        (0..requests.len())
            .for_each(|at| simulation.schedule(requests[at].at, SimEvent::Arrival(at)));
        simulation
    }

    fn schedule(&mut self, at: f64, event: SimEvent) {
        self.numbers += 1;
        self.schedule.push(ScheduledEvent {
            at,
            number: self.numbers,
            event,
        });
    }

    fn run(mut self) -> HerdTotals {
        while let Some(ScheduledEvent { at: now, event, .. }) = self.schedule.pop() {
            *self.clock.lock() = now;
            match event {
                SimEvent::Arrival(request) => self.arrive(request, now),
                SimEvent::BookingReceived { at, from, event } => {
                    if let ReservationEvent::Booked { bookings, .. } = &event {
                        *self
                            .in_flight
                            .entry((at, bookings[0].rank.worker.0 as usize))
                            .or_default() -= 1;
                    }
                    self.replicas[at].apply(from, event);
                }
                SimEvent::Prefilled(request) => {
                    let running = self.running.get_mut(&request).unwrap();
                    running.placement.reservation.on_first_token();
                    let replica = running.replica;
                    let worker = running.worker;
                    self.store(request, worker);
                    self.publish(replica, now);
                }
                SimEvent::Ended(request) => {
                    let running = self.running.remove(&request).unwrap();
                    let replica = running.replica;
                    drop(running);
                    self.publish(replica, now);
                }
            }
        }
        self.result
    }

    fn arrive(&mut self, number: usize, now: f64) {
        let request = &self.requests[number];
        let at = number % self.replicas.len();
        let route_request = || {
            RouteRequest::new(
                Some("m".into()),
                RoutePrompt::Hashed(vec![request.prompt.clone()]),
            )
        };
        let reference = self.oracle.router.preview(route_request()).unwrap();
        self.estimate_in_flight(at);
        let placement = self.replicas[at].router.route(route_request()).unwrap();
        let worker = placement.route.to.rank.worker.0 as usize;
        let cost = reference
            .scores
            .iter()
            .find(|(endpoint, _)| *endpoint == placement.route.to.endpoint)
            .unwrap()
            .1;
        let least = reference
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
                self.in_flight
                    .get(&(at, worker))
                    .is_some_and(|count| *count > 0),
            );
        }
        self.add_load_spread();
        let known = &self.cached[worker];
        let hits = request
            .prompt
            .sequences()
            .iter()
            .take_while(|hash| known.contains(&hash.0))
            .count();
        let uncached = request.tokens - hits * BLOCK;
        let sums = &mut self.result;
        sums.cached += (hits * BLOCK) as u64;
        sums.computed += uncached as u64;
        let done = self.busy_until[worker].max(now) + uncached as f64 / self.prefill_rate;
        self.busy_until[worker] = done;
        self.result.waits.push(done - now);
        let end = done + request.output as f64 * TOKEN;
        self.schedule(done, SimEvent::Prefilled(number));
        self.schedule(end, SimEvent::Ended(number));
        let running = RunningRequest {
            replica: at,
            worker,
            placement,
        };
        self.running.insert(number, running);
        self.publish(at, now);
    }

    /// Adds the coefficient of variation of the workers' load.
    fn add_load_spread(&mut self) {
        let snapshot = self.oracle.router.load().snapshot();
        let loads = snapshot
            .iter()
            .map(|load| load.active_prefill_tokens as f64);
        let loads: Vec<f64> = loads.collect();
        let mean = loads.iter().sum::<f64>() / loads.len() as f64;
        if mean > 0.0 {
            let variance =
                loads.iter().map(|load| (load - mean).powi(2)).sum::<f64>() / loads.len() as f64;
            self.result.spread += variance.sqrt() / mean;
            self.result.spreads += 1;
        }
    }

    /// Updates the estimate of bookings in flight to a replica from the observed rate.
    fn estimate_in_flight(&self, at: usize) {
        let BookingSync::Expected(delay) = self.sync else {
            return;
        };
        let sums = &self.result;
        let others = (self.replicas.len() - 1) as f64 / self.replicas.len() as f64;
        let rate = self.requests.len() as f64 / self.requests.last().map_or(1.0, |last| last.at);
        let each = |sum: u64| sum / sums.choices.max(1);
        let in_flight = InFlightEstimate {
            bookings: rate * others * delay,
            prefill_tokens: each(sums.computed),
            blocks: each(sums.computed + sums.cached) / BLOCK as u64,
            ranks: self.cached.len(),
        };
        self.replicas[at]
            .router
            .set_in_flight_estimates(HashMap::from([(
                ("m".into(), BookingEnd::RequestEnd),
                in_flight,
            )]));
    }

    /// Applies the engines' events at all replicas at the same time.
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
            tier: StorageTier::Device,
        });
        self.cached[worker].extend(prompt.sequences().iter().map(|hash| hash.0));
    }

    fn publish(&mut self, from: usize, now: f64) {
        let events = std::mem::take(&mut *self.replicas[from].events.lock());
        for event in events {
            self.oracle.apply(from, event.clone());
            let others: Vec<usize> = (0..self.replicas.len()).filter(|at| *at != from).collect();
            for at in others {
                if let ReservationEvent::Booked { bookings, .. } = &event {
                    *self
                        .in_flight
                        .entry((at, bookings[0].rank.worker.0 as usize))
                        .or_default() += 1;
                }
                if let BookingSync::After(delay) | BookingSync::Expected(delay) = self.sync {
                    self.schedule(
                        now + delay,
                        SimEvent::BookingReceived {
                            at,
                            from,
                            event: event.clone(),
                        },
                    );
                }
            }
        }
    }
}

impl HerdTotals {
    fn print_row(&mut self, replicas: usize, sync: BookingSync) {
        self.waits.sort_by(f64::total_cmp);
        let quantile = |q: f64| self.waits[((self.waits.len() - 1) as f64 * q) as usize] * 1e3;
        let sync = match sync {
            _ if replicas == 1 => "-".to_owned(),
            BookingSync::After(seconds) => format!("{} ms", seconds * 1e3),
            BookingSync::Expected(seconds) => format!("{} ms, estimated", seconds * 1e3),
            BookingSync::Never => "never".to_owned(),
        };
        let of = |count: u64| 100.0 * count as f64 / self.choices as f64;
        println!(
            "| {replicas} | {sync} | {:.2} | {:.2} | {:.3} | {:.2} | {:.1} | {:.0} | {:.0} |",
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
    let args = HerdArgs::parse();
    let requests = requests(&args);
    let span = requests.last().unwrap().at;
    let all: usize = requests.iter().map(|request| request.tokens).sum();
    let rate = |computed: f64| computed / (span * args.workers as f64 * BUSY);
    // The computed tokens depend on the choices, and the choices depend on the prefill rate.
    let mut prefill_rate = rate(all as f64 * 0.7);
    for _ in 0..3 {
        let sums = HerdSimulation::new(&requests, &args, 1, BookingSync::Never, prefill_rate).run();
        prefill_rate = rate(sums.computed as f64);
    }
    println!(
        "{} requests in {span:.0} s, {} workers of {prefill_rate:.0} prompt tokens/s each\n",
        requests.len(),
        args.workers
    );
    println!(
        "| replicas | bookings after | stale, % | duplicates, % | regret, blocks | imbalance | hit rate, % | p50, ms | p99, ms |"
    );
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let after = [0.0, 0.002, 0.005, 0.02, 0.1];
    let sync = after
        .into_iter()
        .flat_map(|after| [BookingSync::After(after), BookingSync::Expected(after)]);
    let sync: Vec<BookingSync> = sync.skip(1).chain([BookingSync::Never]).collect();
    let mut cases = vec![(1, BookingSync::Never)];
    cases.extend(
        [2, 3, 8]
            .into_iter()
            .flat_map(|replicas| sync.iter().map(move |sync| (replicas, *sync))),
    );
    for (replicas, sync) in cases {
        HerdSimulation::new(&requests, &args, replicas, sync, prefill_rate)
            .run()
            .print_row(replicas, sync);
    }
}
