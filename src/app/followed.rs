//! One event source from its start to its end: where it begins, the way of its events into the index, and who is told how
//! far it can be believed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::api::{Feed, Joined};
use crate::fleet::Member;
use crate::kv_events::{self, RankSink, SourceSpec, SourceState, Witness};
use crate::lifecycle::{ReadyGuard, supervise};
use crate::metrics::Metrics;
use crate::router::Router;
use crate::takeover::{self, Takeover};
use crate::trust::{Because, Standing};
use crate::worker::WorkerRank;

/// How often it is looked whether sources are silent.
const LOOK: Duration = Duration::from_secs(1);

/// The name under which its task is seen.
pub(super) fn task_name(rank: WorkerRank) -> String {
    format!("kv_events {rank}")
}

/// Writes down what is known, for the next start.
pub(super) fn leave(file: &Path, feed: &Feed, router: &Router) {
    // Whoever was not heard at the end may hold anything by now.
    let heard = feed
        .ranks()
        .into_iter()
        .filter(|rank| router.trust(*rank).is_attached());
    let ranks = heard
        .filter_map(|rank| feed.copy(rank))
        .filter(|held| held.position().is_some());
    match takeover::write(file, ranks) {
        Ok(0) => {
            info!(file = %file.display(), "nothing is known that could be left for the next start")
        }
        Ok(ranks) => {
            info!(file = %file.display(), ranks, "what is known is left for the next start")
        }
        Err(problem) => warn!(
            problem = format!("{problem:#}"),
            "what is known is not left for the next start"
        ),
    }
}

/// One event source and who wants to know how it does.
pub(super) struct Followed {
    pub(super) spec: SourceSpec,
    pub(super) member: Member,
    pub(super) router: Arc<Router>,
    pub(super) feed: Arc<Feed>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) deadline: Instant,
    /// Where it begins, and a step of readiness until that is known.
    pub(super) takeover: Option<(Arc<Takeover>, ReadyGuard)>,
}

impl Followed {
    /// Follows until it is stopped.
    pub(super) async fn run(mut self, ready: Option<ReadyGuard>, stop: CancellationToken) {
        let (state, states) = watch::channel(SourceState::Connecting);
        let witness = Witness::default();
        self.router
            .sources()
            .watch(self.spec.rank, witness.source().clone());
        let name = task_name(self.spec.rank);
        // Only at the first start: after a failure the engine knows best.
        let mut takeover = self.takeover.take();
        let source = supervise(&name, &self.metrics, stop, || {
            let (spec, metrics, state) = (self.spec.clone(), self.metrics.clone(), state.clone());
            let (joined, sink) = self.sink();
            let takeover = takeover.take();
            // What is left of an earlier life is out of the index.
            witness.reset();
            let (detached, witness) = (Detached(state.clone()), witness.clone());
            async move {
                let _detached = detached;
                if let Some((takeover, ready)) = takeover {
                    if let Some(held) = takeover.copy(spec.rank, spec.reading()).await {
                        tokio::task::spawn_blocking(move || joined.restore(&held)).await?;
                    }
                    ready.done();
                }
                kv_events::run(spec, sink, metrics, (state, witness)).await;
                Ok(())
            }
        });
        tokio::select! {
            () = source => {}
            () = self.follow(states, &witness, ready) => {}
        }
    }

    /// The way of the rank's events into the index. Dropping it takes the rank out of the index.
    fn sink(&self) -> (Arc<Joined>, RankSink) {
        let slot = self.member.slot;
        let joined = Arc::new(
            self.feed
                .join(self.spec.rank, self.router.index().join(slot)),
        );
        // The capacity may have become known after the source was started.
        let fleet = self.router.fleet();
        let current = fleet
            .member(slot)
            .filter(|member| member.rank == self.member.rank);
        self.router.limit_blocks(current.unwrap_or(&self.member));
        let (doubted, settled, position) =
            (joined.clone(), joined.clone(), joined.position().clone());
        let applied = joined.clone();
        let sink = RankSink {
            apply: Box::new(move |event| applied.apply(event)),
            doubt: Box::new(move || doubted.doubt()),
            settle: Box::new(move || settled.settle()),
            position,
        };
        (joined, sink)
    }

    /// Tells the router whether the source can be believed, and readiness when it can, or when waiting is over.
    async fn follow(
        &self,
        mut states: watch::Receiver<SourceState>,
        witness: &Witness,
        mut ready: Option<ReadyGuard>,
    ) {
        let mut looks = tokio::time::interval(LOOK);
        loop {
            let live = *states.borrow_and_update() == SourceState::Live;
            self.tell(witness.standing());
            if live {
                ready.take().into_iter().for_each(ReadyGuard::done);
            }
            tokio::select! {
                changed = states.changed() => if changed.is_err() { std::future::pending::<()>().await },
                () = tokio::time::sleep_until(self.deadline), if ready.is_some() => {
                    ready.take().into_iter().for_each(ReadyGuard::give_up);
                }
                () = witness.changed() => {}
                _ = looks.tick() => self.look(witness),
            }
        }
    }

    /// Tells the router how the source stands, and the log where that is news.
    fn tell(&self, standing: Standing) {
        let rank = self.spec.rank;
        let before = self.router.trust(rank);
        self.router.set_trust(rank, standing);
        if (before.trust, before.because) != (standing.trust, standing.because) {
            let because = standing.because.map(Because::as_str);
            tracing::info!(%rank, trust = standing.trust.as_str(), because, "trust in the KV event source");
        }
    }

    /// A source that has become silent is attached anew: its connection may be dead without either side knowing.
    fn look(&self, witness: &Witness) {
        let rules = self.router.settings().trust;
        let was_silent = witness.source().lock().is_silent();
        // Answers may have settled doubts since the last batch.
        witness.note(|source| {
            self.router
                .index()
                .doubted(self.member.slot)
                .into_iter()
                .for_each(|doubted| source.doubted(doubted));
            source.look(std::time::Instant::now(), &rules);
        });
        if !was_silent && witness.source().lock().is_silent() {
            warn!(
                rank = %self.spec.rank,
                "requests were answered that had to store blocks, and no KV events came; it is attached anew"
            );
            witness.knock();
        }
    }
}

/// Takes back, by drop, that a source is caught up: when it failed, the index holds nothing of its rank any longer.
struct Detached(watch::Sender<SourceState>);

impl Drop for Detached {
    fn drop(&mut self) {
        self.0.send_replace(SourceState::Connecting);
    }
}
