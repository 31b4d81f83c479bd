//! List and watch of one kind of object, without end.

use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::client::{ApiClient, ObjectQuery};
use super::error::{ApiVerb, RequestError};
use super::list_watch::{ListWatch, NextStep, QuietWatch};
use super::object_watch::{ObjectWatch, WatchEvent};
use super::store::ObjectChange;

/// Outcome of a list or watch step.
#[derive(Debug)]
pub(super) enum WatchUpdate<K> {
    Changed(ObjectChange<K>),
    /// The watch is open; nothing has changed.
    Alive,
    Failed(RequestError),
}

/// Health of a list and watch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum WatchHealth {
    /// No watch and no failure yet.
    #[default]
    Starting,
    Up,
    Failed(RequestError),
}

/// Lists and watches the objects of a query. [`next`](Self::next) is cancel-safe.
pub(super) struct ObjectReflector<K> {
    updates: BoxStream<'static, (WatchUpdate<K>, bool)>,
    health: WatchHealth,
}

impl<K: DeserializeOwned + Send + 'static> ObjectReflector<K> {
    pub(super) fn new(client: ApiClient, query: ObjectQuery) -> Self {
        let list_watch = ListWatch::new(client.deadline());
        let requests = ObjectRequests {
            client,
            query,
            list_watch,
            watch: None,
        };
        let updates = stream::unfold(requests, async |mut requests| {
            let update = requests.next().await;
            let is_up = requests.list_watch.is_up();
            Some(((update, is_up), requests))
        });
        Self {
            updates: updates.boxed(),
            health: WatchHealth::Starting,
        }
    }

    pub(super) async fn next(&mut self) -> WatchUpdate<K> {
        let Some((update, is_up)) = self.updates.next().await else {
            return std::future::pending().await;
        };
        match &update {
            WatchUpdate::Failed(error) => self.health = WatchHealth::Failed(error.clone()),
            WatchUpdate::Alive | WatchUpdate::Changed(_) if is_up => self.health = WatchHealth::Up,
            WatchUpdate::Alive | WatchUpdate::Changed(_) => {}
        }
        update
    }

    pub(super) fn health(&self) -> &WatchHealth {
        &self.health
    }
}

struct ObjectRequests {
    client: ApiClient,
    query: ObjectQuery,
    list_watch: ListWatch,
    watch: Option<ObjectWatch>,
}

impl ObjectRequests {
    async fn next<K: DeserializeOwned>(&mut self) -> WatchUpdate<K> {
        loop {
            let update = match self.list_watch.next_step() {
                NextStep::Wait(until) => {
                    sleep_until(until).await;
                    self.list_watch.on_waited();
                    None
                }
                NextStep::List => self.list().await,
                NextStep::Watch(version) => self.open(&version).await,
                NextStep::Read(until) => self.read(until).await,
            };
            if let Some(update) = update {
                return update;
            }
        }
    }

    async fn list<K: DeserializeOwned>(&mut self) -> Option<WatchUpdate<K>> {
        match self.client.list(&self.query).await {
            Ok(list) => {
                self.list_watch.on_listed(list.version);
                Some(WatchUpdate::Changed(ObjectChange::Listed(list.objects)))
            }
            Err(error) => self.fail(error),
        }
    }

    async fn open<K>(&mut self, version: &str) -> Option<WatchUpdate<K>> {
        match self.client.watch(&self.query, version).await {
            Ok(watch) => {
                self.watch = Some(watch);
                self.list_watch.on_opened(Instant::now());
                self.list_watch.is_up().then_some(WatchUpdate::Alive)
            }
            Err(error) => self.fail(error),
        }
    }

    async fn read<K: DeserializeOwned>(&mut self, until: Instant) -> Option<WatchUpdate<K>> {
        let watch = self.watch.as_mut()?;
        let Ok(event) = timeout_at(until, watch.next()).await else {
            return match self.list_watch.on_quiet(Instant::now()) {
                QuietWatch::Works => Some(WatchUpdate::Alive),
                QuietWatch::Dead => {
                    let error = self.client.silent_watch(&self.query, watch.opened).await;
                    self.fail(error)
                }
            };
        };
        match event {
            Some(WatchEvent::Changed { change, version }) => {
                self.list_watch.on_event(version, Instant::now());
                Some(WatchUpdate::Changed(change))
            }
            Some(WatchEvent::Bookmark { version }) => {
                self.list_watch.on_event(version, Instant::now());
                Some(WatchUpdate::Alive)
            }
            Some(WatchEvent::Failed(failure)) => {
                let error = self
                    .client
                    .error(&self.query, ApiVerb::Watch, failure)
                    .await;
                self.fail(error)
            }
            None => self.close().await,
        }
    }

    async fn close<K>(&mut self) -> Option<WatchUpdate<K>> {
        self.watch = None;
        if !self.list_watch.on_closed(Instant::now(), rand::random()) {
            return None;
        }
        let failure = super::error::RequestFailure::Transport(
            "the watch ended immediately, without an event".to_owned(),
        );
        Some(WatchUpdate::Failed(
            self.client
                .error(&self.query, ApiVerb::Watch, failure)
                .await,
        ))
    }

    fn fail<K>(&mut self, error: RequestError) -> Option<WatchUpdate<K>> {
        self.watch = None;
        let is_reported =
            self.list_watch
                .on_failure(error.failure_kind(), Instant::now(), rand::random());
        is_reported.then_some(WatchUpdate::Failed(error))
    }
}
