//! Listening to the API server: each pool by a watch of its own, and one of its InferencePool. Whatever goes wrong there is tried
//! again for ever, and changes nothing of the fleet.

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::{self, BoxStream};
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::config::{KubernetesConfig, PodsConfig};
use super::objects::{self, InferencePool, Pod};
use super::pool::{Membership, Pods};
use crate::discovery::config::WorkerConfig;
use crate::discovery::found::{Found, tell};
use crate::discovery::{ServedModel, Standing, resolve_each};
use crate::metrics::Metrics;
use crate::worker::Worker;

/// Changes that come within this time are one.
const TOGETHER: Duration = Duration::from_millis(20);

/// The first wait after a failure, and the longest.
const WAITS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Listens for ever and reports each new fleet, the first one when any pool was told of.
pub async fn watch(
    config: KubernetesConfig,
    models: Vec<ServedModel>,
    metrics: Arc<Metrics>,
    mut on_fleet: impl FnMut(Vec<Worker>),
) -> anyhow::Result<Infallible> {
    let client = client(&config).await?;
    let (tell, mut told) = mpsc::unbounded_channel();
    let pools = config.pools.iter().enumerate().map(|(at, pool)| {
        let follower = Follower::new(&config, pool, &client, &metrics);
        let tell = tell.clone();
        follower.run(move |workers| _ = tell.send((at, workers)))
    });
    let gathered = async {
        let mut all: Vec<Vec<WorkerConfig>> = vec![Vec::new(); config.pools.len()];
        let mut found = Found::new("kubernetes", models);
        while let Some((at, workers)) = told.recv().await {
            all[at] = workers;
            found.take(all.concat()).into_iter().for_each(&mut on_fleet);
        }
    };
    tokio::select! {
        _ = join_all(pools) => anyhow::bail!("nobody listens to Kubernetes"),
        () = gathered => anyhow::bail!("nobody listens to Kubernetes"),
    }
}

/// Looks once.
pub async fn look(config: &KubernetesConfig, models: &[ServedModel]) -> anyhow::Result<Vec<Worker>> {
    let client = client(config).await?;
    let mut all = Vec::new();
    for pool in &config.pools {
        let (pools, pods) = apis(pool, &client);
        let membership = match &pool.name {
            Some(name) => Membership::of(&pools.get(name).await?).with_context(|| format!("{name} has no selector"))?,
            None => Membership::configured(pool).unwrap_or_default(),
        };
        let mut found = Pods::default();
        for pod in pods.list(&ListParams::default().labels(&membership.label_selector())).await?.items {
            found.take(Event::InitApply(pod));
        }
        found.take(Event::InitDone);
        all.extend(found.workers(&membership, pool, &config.labels).map(|(workers, _)| workers).unwrap_or_default());
    }
    Ok(resolve_each(all, models).0)
}

pub(super) async fn client(config: &KubernetesConfig) -> anyhow::Result<Client> {
    let mut settings = match &config.kubeconfig {
        None => kube::Config::infer().await.context("it is not known where the API server of Kubernetes is")?,
        Some(file) => {
            let file = Kubeconfig::read_from(file).context("the kubeconfig cannot be used")?;
            let options = KubeConfigOptions { context: config.context.clone(), ..KubeConfigOptions::default() };
            kube::Config::from_custom_kubeconfig(file, &options).await.context("the kubeconfig cannot be used")?
        }
    };
    settings.connect_timeout = Some(WAITS.1);
    Ok(Client::try_from(settings)?)
}

fn apis(pool: &PodsConfig, client: &Client) -> (Api<InferencePool>, Api<Pod>) {
    let namespace = pool.namespace.as_deref().unwrap_or_else(|| client.default_namespace()).to_owned();
    let pools = Api::namespaced_with(client.clone(), &namespace, &objects::inference_pools());
    (pools, Api::namespaced_with(client.clone(), &namespace, &objects::pods()))
}

/// The objects of one kind, listened to. After a failure all are listed anew: a watch that only goes on says nothing where nothing
/// changed, and nobody would know that it is well again.
pub(super) struct Listening<K> {
    api: Api<K>,
    config: watcher::Config,
    told: BoxStream<'static, Result<Event<K>, watcher::Error>>,
    /// Failures since the last list.
    failures: u32,
    is_well: bool,
}

impl<K> Listening<K>
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    pub(super) fn new(api: Api<K>, config: watcher::Config) -> Self {
        let told = watcher(api.clone(), config.clone()).boxed();
        Self { api, config, told, failures: 0, is_well: false }
    }

    pub(super) async fn next(&mut self) -> Result<Event<K>, String> {
        let told = self.told.next().await;
        match told {
            Some(Ok(event)) => {
                if matches!(event, Event::InitDone) {
                    (self.is_well, self.failures) = (true, 0);
                }
                Ok(event)
            }
            Some(Err(error)) => Err(self.fail(error.to_string())),
            None => Err(self.fail("the watch has ended".to_owned())),
        }
    }

    /// Begins anew after a wait, which grows, and is not the same on every replica.
    fn fail(&mut self, reason: String) -> String {
        self.is_well = false;
        let wait = backoff(self.failures);
        self.failures += 1;
        let wait = stream::once(tokio::time::sleep(wait)).filter_map(async |()| None);
        self.told = wait.chain(watcher(self.api.clone(), self.config.clone())).boxed();
        reason
    }
}

/// How long to wait after so many failures.
pub(super) fn backoff(failures: u32) -> Duration {
    WAITS.0.saturating_mul(1 << failures.min(10)).min(WAITS.1).mul_f64(rand::random_range(0.5..1.0))
}

/// What is told next; nothing ever where nobody listens.
async fn next<K>(listening: &mut Option<Listening<K>>) -> Result<Event<K>, String>
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    match listening {
        Some(listening) => listening.next().await,
        None => std::future::pending().await,
    }
}

/// One pool, followed.
struct Follower<'a> {
    config: &'a KubernetesConfig,
    pool: &'a PodsConfig,
    pods_api: Api<Pod>,
    /// None where no InferencePool is named.
    pools: Option<Listening<InferencePool>>,
    /// None where it is not known which pods.
    pods: Option<Listening<Pod>>,
    membership: Option<Membership>,
    /// Of the InferencePool: whether a list that is being read has it.
    is_listed: bool,
    found: Pods,
    standing: Standing,
    odd: Vec<String>,
}

impl<'a> Follower<'a> {
    fn new(config: &'a KubernetesConfig, pool: &'a PodsConfig, client: &Client, metrics: &Arc<Metrics>) -> Self {
        let (pools_api, pods_api) = apis(pool, client);
        let named = |name: &String| follows(config).fields(&format!("metadata.name={name}"));
        let configured = Membership::configured(pool);
        let standing = Standing::new(format!("kubernetes {}", pool.title()), metrics);
        let mut follower = Self {
            config,
            pool,
            pods_api,
            pools: pool.name.as_ref().map(|name| Listening::new(pools_api, named(name))),
            pods: None,
            membership: None,
            is_listed: false,
            found: Pods::default(),
            standing,
            odd: Vec::new(),
        };
        if let Some(membership) = configured {
            follower.belong(membership);
        }
        follower
    }

    /// Tells of the workers whenever they may be others.
    async fn run(mut self, mut tell: impl FnMut(Vec<WorkerConfig>)) {
        let mut due: Option<Instant> = None;
        loop {
            let wait = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            let news = tokio::select! {
                told = next(&mut self.pools) => self.pool_told(told),
                told = next(&mut self.pods) => self.pods_told(told),
                () = wait => {
                    due = None;
                    self.workers().into_iter().for_each(&mut tell);
                    false
                }
            };
            if news {
                due.get_or_insert_with(|| Instant::now() + TOGETHER);
            }
        }
    }

    fn pool_told(&mut self, told: Result<Event<InferencePool>, String>) -> bool {
        match told {
            Err(reason) => {
                self.standing.bad(&reason);
                return false;
            }
            Ok(Event::Init) => self.is_listed = false,
            Ok(Event::InitApply(pool) | Event::Apply(pool)) => {
                self.is_listed = true;
                match Membership::of(&pool) {
                    Some(membership) => self.belong(membership),
                    None => self.leave("the InferencePool selects nothing"),
                }
            }
            Ok(Event::InitDone) if self.is_listed => {}
            Ok(Event::InitDone | Event::Delete(_)) => self.leave("there is no such InferencePool"),
        }
        self.tell_standing();
        true
    }

    fn pods_told(&mut self, told: Result<Event<Pod>, String>) -> bool {
        match told {
            Ok(event) => {
                let news = self.found.take(event);
                self.tell_standing();
                news
            }
            Err(reason) => {
                self.standing.bad(&reason);
                false
            }
        }
    }

    fn tell_standing(&mut self) {
        let pools = self.pools.as_ref().is_none_or(|pools| pools.is_well);
        if pools && self.pods.as_ref().is_some_and(|pods| pods.is_well) {
            self.standing.good();
        }
    }

    /// From now on other pods may be members. Those that were stay until the others are known.
    fn belong(&mut self, membership: Membership) {
        let selector = membership.label_selector();
        if self.pods.is_none() || self.membership.as_ref().map(Membership::label_selector).as_ref() != Some(&selector) {
            self.pods = Some(Listening::new(self.pods_api.clone(), follows(self.config).labels(&selector)));
        }
        self.membership = Some(membership);
    }

    /// Nobody is a member.
    fn leave(&mut self, reason: &str) {
        self.standing.bad(reason);
        (self.membership, self.pods) = (None, None);
        self.found.forget();
    }

    fn workers(&mut self) -> Option<Vec<WorkerConfig>> {
        let membership = self.membership.clone().unwrap_or_default();
        let (workers, odd) = self.found.workers(&membership, self.pool, &self.config.labels)?;
        tell(&mut self.odd, odd);
        Some(workers)
    }
}

pub(super) fn follows(config: &KubernetesConfig) -> watcher::Config {
    let seconds = u32::try_from(config.silence.get().as_secs()).unwrap_or(u32::MAX).max(1);
    watcher::Config::default().timeout(seconds)
}
