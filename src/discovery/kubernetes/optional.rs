//! Listening to objects that need not be there: neither their kind has to be installed, nor do we have to be allowed to read it.
//! Then we go on without, say so once, and look again after some minutes. What cannot be reached keeps its last word.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::Debug;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicResourceScope};
use kube::runtime::watcher::Event;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tracing::info;

use super::config::KubernetesConfig;
use super::objects::{GROUPS, Kind, OBJECTIVES, Objective, REWRITES, Rewrite};
use super::rules::{self, Followed, Objects, OurPool, Rules};
use super::watch::{Listening, backoff, client, follows};

/// Status of what is not installed, and of what we may not read.
const ABSENT: u16 = 404;
const FORBIDDEN: u16 = 403;

/// Listens for ever to what the pools say of requests, and reports each change. Nothing is reported before all of it is known,
/// or known not to be there.
pub async fn watch_rules(config: &KubernetesConfig, mut on_rules: impl FnMut(Rules)) -> anyhow::Result<Infallible> {
    let client = client(config).await?;
    let ours = ours(config, &client);
    let namespaces: BTreeSet<&str> = ours.iter().map(|pool| pool.namespace.as_str()).collect();
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut followers: Vec<BoxFuture<'_, Infallible>> = Vec::new();
    for namespace in &namespaces {
        let place = |kind| Place { client: client.clone(), config, namespace: (*namespace).to_owned(), kind };
        let (objectives, rewrites) = (tell.clone(), tell.clone());
        let follower =
            place(OBJECTIVES).follow(move |followed, all| _ = objectives.send(News::Objectives(followed, all)));
        followers.push(follower.boxed());
        let follower = place(REWRITES).follow(move |followed, all| _ = rewrites.send(News::Rewrites(followed, all)));
        followers.push(follower.boxed());
    }
    if followers.is_empty() {
        // Labels and ports have no objects beside them.
        on_rules(Rules::default());
        return std::future::pending().await;
    }
    let expected = followers.len();
    let gathered = async {
        let mut known = Known::default();
        while let Some(news) = told.recv().await {
            known.take(news);
            if known.followed.len() == expected {
                on_rules(known.rules(&ours));
            }
        }
    };
    tokio::select! {
        _ = join_all(followers) => anyhow::bail!("nobody listens to Kubernetes"),
        () = gathered => anyhow::bail!("nobody listens to Kubernetes"),
    }
}

fn ours(config: &KubernetesConfig, client: &Client) -> Vec<OurPool> {
    let named = config.pools.iter().filter_map(|pool| Some((pool, pool.name.clone()?)));
    let pool = |(pool, name): (&super::PodsConfig, String)| OurPool {
        title: pool.title().into(),
        namespace: pool.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned()),
        name,
    };
    named.map(pool).collect()
}

/// The objects of one kind in one namespace, and how it is with them.
enum News {
    Objectives(Followed, BTreeMap<String, Objective>),
    Rewrites(Followed, BTreeMap<String, Rewrite>),
}

/// What was told last.
#[derive(Default)]
struct Known {
    followed: BTreeMap<(&'static str, String), Followed>,
    objectives: Objects<Objective>,
    rewrites: Objects<Rewrite>,
}

impl Known {
    fn take(&mut self, news: News) {
        let (News::Objectives(followed, _) | News::Rewrites(followed, _)) = &news;
        let (namespace, followed) = (followed.namespace.clone(), followed.clone());
        self.followed.insert((followed.kind, namespace.clone()), followed);
        match news {
            News::Objectives(_, all) => drop(self.objectives.insert(namespace, all)),
            News::Rewrites(_, all) => drop(self.rewrites.insert(namespace, all)),
        }
    }

    fn rules(&self, ours: &[OurPool]) -> Rules {
        Rules {
            objects: self.followed.values().cloned().collect(),
            objectives: rules::objectives(ours, &self.objectives),
            rewrites: rules::rewrites(ours, &self.rewrites),
        }
    }
}

/// What may be told of: an object of which only the API server knows the kind.
trait Optional:
    Resource<DynamicType = ApiResource, Scope = DynamicResourceScope> + Clone + DeserializeOwned + Debug + Send + 'static
{
}

impl<K> Optional for K where
    K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static
{
}

/// Where objects of one kind may be.
struct Place<'a> {
    client: Client,
    config: &'a KubernetesConfig,
    namespace: String,
    kind: Kind,
}

/// Why there are no such objects.
enum Lacking {
    /// The status that says so.
    NotThere(u16),
    /// It could not be found out.
    Unknown,
}

impl Place<'_> {
    /// Listens for ever, and tells whenever the objects, or how it is with them, are others.
    async fn follow<K>(self, mut tell: impl FnMut(Followed, BTreeMap<String, K>)) -> Infallible
    where
        K: Optional,
    {
        let (mut known, mut failures, mut said) = (BTreeMap::new(), 0, None);
        loop {
            match self.look().await {
                Ok((api, group)) => {
                    let mut tell = |known: &BTreeMap<String, K>| {
                        failures = 0;
                        let followed = self.say(&mut said, format!("followed as {group}/v1alpha2"));
                        tell(followed, known.clone());
                    };
                    let listening = self.listen(api, &mut known, &mut tell);
                    if group == GROUPS[0] {
                        listening.await;
                    } else {
                        // The other group may be installed meanwhile.
                        _ = tokio::time::timeout(self.again(), listening).await;
                        continue;
                    }
                }
                Err(Lacking::NotThere(status)) => {
                    let standing = if status == ABSENT {
                        known.clear();
                        "not installed"
                    } else {
                        "not ours to read"
                    };
                    let followed = self.say(&mut said, standing.to_owned());
                    tell(followed, known.clone());
                    tokio::time::sleep(self.again()).await;
                    continue;
                }
                Err(Lacking::Unknown) => {}
            }
            tokio::time::sleep(backoff(failures)).await;
            failures += 1;
        }
    }

    /// Listens until something is wrong.
    async fn listen<K>(&self, api: Api<K>, known: &mut BTreeMap<String, K>, tell: &mut impl FnMut(&BTreeMap<String, K>))
    where
        K: Optional,
    {
        let uid = |object: &K| object.meta().uid.clone().unwrap_or_default();
        let mut listening = Listening::new(api, follows(self.config));
        let mut listed = BTreeMap::new();
        while let Ok(event) = listening.next().await {
            match event {
                Event::Init => listed.clear(),
                Event::InitApply(object) => drop(listed.insert(uid(&object), object)),
                Event::InitDone => {
                    *known = std::mem::take(&mut listed);
                    tell(known);
                }
                Event::Apply(object) => {
                    known.insert(uid(&object), object);
                    tell(known);
                }
                Event::Delete(object) => {
                    known.remove(&uid(&object));
                    tell(known);
                }
            }
        }
    }

    /// The objects, and of which group they are.
    async fn look<K>(&self) -> Result<(Api<K>, &'static str), Lacking>
    where
        K: Optional,
    {
        let mut not_there = ABSENT;
        for group in GROUPS {
            let api: Api<K> = Api::namespaced_with(self.client.clone(), &self.namespace, &self.kind.of(group));
            match api.list(&ListParams::default().limit(1)).await {
                Ok(_) => return Ok((api, group)),
                Err(kube::Error::Api(status)) if status.code == FORBIDDEN => not_there = FORBIDDEN,
                Err(kube::Error::Api(status)) if status.code == ABSENT => {}
                Err(_) => return Err(Lacking::Unknown),
            }
        }
        Err(Lacking::NotThere(not_there))
    }

    /// How long until it is looked again; not the same on every replica.
    fn again(&self) -> Duration {
        self.config.look_again.get().mul_f64(rand::random_range(0.8..1.2))
    }

    fn say(&self, said: &mut Option<String>, standing: String) -> Followed {
        let (kind, namespace) = (self.kind.kind, self.namespace.clone());
        if said.as_ref() != Some(&standing) {
            info!(kind, namespace, standing, "what InferencePools say of requests");
            *said = Some(standing.clone());
        }
        Followed { kind, namespace, standing }
    }
}
