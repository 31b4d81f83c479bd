//! What our configuration says that Envoy's has to agree with.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::dump::Address;
use crate::config::{Config, SessionsConfig};
use crate::ext_proc::config::FailureMode;
use crate::ext_proc::contract::Contract;
use crate::intake::confine::PoolAuthorities;
use crate::openai::paths::Paths;
use crate::prefill::{By, PrefillConfig};
use crate::worker::{ModelName, Worker};

/// What Envoy must add to the longest wait of a request.
const MARGIN: Duration = Duration::from_millis(500);
/// The same of a further try, which asks for more.
const RETRY_MARGIN: Duration = Duration::from_secs(1);

/// Our side.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Where Envoy reaches us by TCP.
    pub tcp: Option<SocketAddr>,
    /// Whether that is encrypted.
    pub tls: bool,
    /// Where Envoy reaches us by a unix socket.
    pub unix: Option<PathBuf>,
    /// Longest body that we take.
    pub body: u64,
    /// How long we may take for a prompt.
    pub exchange_deadline: Duration,
    /// How long a request may wait for its turn, its session or its prefill, and the margin; none: nobody waits.
    pub wait: Option<Duration>,
    /// How long Envoy may have to wait for another prefill at a further try, with the margin; none: we call for none.
    pub calls: Option<Duration>,
    /// Envoy's clusters of prefill workers that get copies, with the models whose requests these are.
    pub mirrors: BTreeMap<String, BTreeSet<ModelName>>,
    /// Which path is which API.
    pub paths: Paths,
    /// Whether requests get 503 where no worker can be chosen.
    pub fail_closed: bool,
    /// Whether Envoy is asked to look for its route again.
    pub clear_route_cache: bool,
    /// How many further endpoints we name for retries.
    pub fallbacks: u32,
    /// Whether there are other replicas of us.
    pub replicas: bool,
    /// The pools by the authority of a call.
    pub pool_authorities: PoolAuthorities,
    /// Headers that we set.
    pub headers: Vec<String>,
    /// Those of them that hold the worker's endpoint.
    pub endpoint_headers: Vec<String>,
    /// Headers that no client may set.
    pub reserved: Vec<String>,
    /// The file that we write for Envoy, and the cluster it is for.
    pub endpoints_file: Option<(PathBuf, String)>,
    /// What we tell as an xDS server, if we are one.
    pub xds: Option<XdsServer>,
    /// The workers that may get requests.
    pub workers: Vec<Worker>,
}

/// Headers that trusted clients may pin workers by, as envoy/README.md says.
const PINS: [&str; 9] = [
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-dp-rank",
    "x-data-parallel-rank",
    "x-prefill-dp-rank",
    "x-dynamo-worker-instance-id",
    "x-dynamo-prefill-instance-id",
    "x-dynamo-dp-rank",
    "x-dynamo-prefill-dp-rank",
];

/// Us as an xDS server.
#[derive(Clone, Debug)]
pub struct XdsServer {
    /// Its own address; none: beside ext_proc.
    pub listen: Option<SocketAddr>,
    /// The clusters that we know, first that of all workers.
    pub clusters: Vec<String>,
}

impl XdsServer {
    /// Whether we tell it there, as far as an address can tell.
    pub fn is_at(&self, expected: &Expected, address: &Address) -> bool {
        match (self.listen, address) {
            (None, _) => expected.is_ours(address),
            (Some(listen), Address::Socket(_, port)) => is_at(listen, *port, address),
            (Some(_), Address::Pipe(_)) => false,
        }
    }
}

/// Whether an address is one that we listen at; a name may be anybody's.
fn is_at(ours: SocketAddr, port: u16, address: &Address) -> bool {
    let named = address.numeric();
    port == ours.port()
        && named.is_none_or(|named| ours.ip().is_unspecified() || named.ip() == ours.ip())
}

impl Expected {
    /// Reads our configuration.
    pub fn new(config: &Config, workers: &[Worker]) -> Self {
        let contract: Contract = config.gateway.contract();
        let names =
            |names: &mut dyn Iterator<Item = &str>| names.map(str::to_owned).collect::<Vec<_>>();
        let mut reserved = names(&mut contract.reserved());
        if config.clients.trusted {
            reserved.retain(|name| !PINS.contains(&name.as_str()));
        }
        Self {
            tcp: config.listen.tcp,
            tls: config.listen.tls.is_some(),
            unix: config.listen.unix.clone(),
            body: config.limits.body.0,
            exchange_deadline: config.limits.exchange_deadline.get(),
            wait: wait(config),
            calls: longest_call(config).map(|longest| longest + RETRY_MARGIN),
            mirrors: mirrors(config),
            paths: Paths::new(&config.paths),
            fail_closed: config.failure.mode == FailureMode::FailClosed,
            clear_route_cache: config.gateway.clear_route_cache,
            fallbacks: config.gateway.fallbacks,
            replicas: config.replicas.is_some(),
            pool_authorities: PoolAuthorities::from(&config.confine),
            headers: names(&mut contract.names()),
            endpoint_headers: names(&mut contract.endpoint_names()),
            reserved,
            endpoints_file: config
                .envoy
                .as_ref()
                .and_then(|envoy| Some((envoy.endpoints_file.clone()?, envoy.cluster.clone()))),
            xds: config.envoy.as_ref().and_then(|envoy| {
                let listen = envoy.xds.as_ref()?.listen;
                Some(XdsServer {
                    listen,
                    clusters: envoy
                        .clusters()
                        .into_iter()
                        .map(|cluster| cluster.name)
                        .collect(),
                })
            }),
            workers: workers
                .iter()
                .filter(|worker| !worker.draining)
                .cloned()
                .collect(),
        }
    }

    /// Whether this is where we listen, as far as an address can tell: a name may be anybody's.
    pub fn is_ours(&self, address: &Address) -> bool {
        match (address, self.tcp, &self.unix) {
            (Address::Pipe(path), _, Some(unix)) => unix.as_os_str() == path.as_str(),
            (Address::Socket(_, port), Some(ours), _) => is_at(ours, *port, address),
            _ => false,
        }
    }

    /// Where we listen, in words, and as Envoy writes it.
    pub fn listening(&self) -> (String, String) {
        let pipe = self.unix.as_ref().map(|path| {
            (
                path.display().to_string(),
                format!("address: {{pipe: {{path: {}}}}}", path.display()),
            )
        });
        let socket = self.tcp.map(|at| {
            let text = format!(
                "address: {{socket_address: {{address: {}, port_value: {}}}}}",
                at.ip(),
                at.port()
            );
            (at.to_string(), text)
        });
        let all: Vec<_> = [pipe, socket].into_iter().flatten().collect();
        let words = all
            .iter()
            .map(|(words, _)| words.as_str())
            .collect::<Vec<_>>()
            .join(" and ");
        (
            words,
            all.into_iter()
                .next()
                .map(|(_, text)| text)
                .unwrap_or_default(),
        )
    }
}

fn mirrors(config: &Config) -> BTreeMap<String, BTreeSet<ModelName>> {
    let mut mirrors: BTreeMap<String, BTreeSet<ModelName>> = BTreeMap::new();
    for model in &config.models {
        if let Some(prefill) = model
            .prefill
            .as_ref()
            .filter(|prefill| prefill.by == By::Mirror)
        {
            mirrors
                .entry(prefill.cluster.clone())
                .or_default()
                .insert(model.name.clone());
        }
    }
    mirrors
}

/// The longest that all tries of one prefill may take.
fn longest_call(config: &Config) -> Option<Duration> {
    let prefills = config
        .models
        .iter()
        .filter_map(|model| model.prefill.as_ref());
    prefills
        .filter(|prefill| prefill.by == By::Call)
        .map(PrefillConfig::longest_call)
        .max()
}

/// The longest wait that a request may ask Envoy for.
fn wait(config: &Config) -> Option<Duration> {
    let queue = &config.queue;
    let gated = |tokens: Option<u64>, share: Option<f64>| tokens.is_some() || share.is_some();
    let waits = gated(
        queue.prefill_busy_threshold,
        queue.prefill_busy_threshold_frac,
    ) || queue.classes.iter().any(|class| {
        gated(
            class.prefill_busy_threshold,
            class.prefill_busy_threshold_frac,
        )
    });
    let turn = waits.then(|| queue.deadline.get());
    let opening = |sessions: &SessionsConfig| {
        sessions
            .engine
            .as_ref()
            .map_or(Duration::ZERO, |engine| engine.timeout.get())
    };
    let session = config
        .sessions
        .as_ref()
        .map(|sessions| sessions.wait.get() + opening(sessions));
    let longest: Duration = turn
        .into_iter()
        .chain(session)
        .chain(longest_call(config))
        .sum();
    (!longest.is_zero()).then(|| longest + MARGIN)
}
