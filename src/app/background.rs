//! What runs beside the requests: what feeds the fleet, what happens from time to time, and what follows files.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::announcer::Announcer;
use super::keeper::{self, Keeper};
use super::workers::{self, Wanted};
use super::{App, learn};
use crate::api::Feed;
use crate::audit::Audit;
use crate::block::TrackingHash;
use crate::config::Config;
use crate::engine_sessions::{EngineAccess, EngineSessions};
use crate::entrance::Entrance;
use crate::kv_events::SharedResync;
use crate::lifecycle::supervise;
use crate::metrics::Metrics;
use crate::replica::Replica;
use crate::takeover::Takeover;
use crate::tls::{self, Pace};
use crate::xds::Envoys;

/// How often what has grown old is looked for.
const SWEEP: Duration = Duration::from_millis(100);

/// What readiness waits for where there are replicas.
const REPLICAS: &str = "what other replicas have booked";

/// How long engines may take at the end to close the sessions that we opened.
const FAREWELL: Duration = Duration::from_secs(2);

impl App {
    /// Reads certificates and tokens again when their files change, and with the configuration.
    pub(super) fn follow_secrets(&mut self, metrics: &Arc<Metrics>) {
        let (secrets, read_again) = (self.secrets.clone(), self.secrets.clone());
        self.reloader.part("secrets", move |_| {
            let secrets = read_again.clone();
            Ok(Box::new(move || secrets.reload()))
        });
        let (metrics, stop) = (metrics.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("secrets", &metrics, stop, || {
                let secrets = secrets.clone();
                async move { match secrets.follow(Pace::default()).await {} }
            })
            .await;
        });
    }

    /// Lets other replicas know what this one does, and it what they do, where there are to be any.
    pub(super) fn join_replicas(
        &mut self,
        config: &Config,
        entrance: &Arc<Entrance>,
    ) -> anyhow::Result<Option<Arc<Replica>>> {
        let Some(settings) = &config.replicas else {
            return Ok(None);
        };
        let key = match config
            .tracking_hash
            .load()
            .map_err(|problem| anyhow::anyhow!("{}", problem.text))?
        {
            TrackingHash::Public => None,
            TrackingHash::Keyed(key) => Some(key),
        };
        let name = settings
            .name
            .clone()
            .or_else(tls::host_name)
            .unwrap_or_default();
        let (metrics, ready) = (
            self.reloader.metrics.clone(),
            self.readiness.wait_for(REPLICAS),
        );
        let replica = Replica::new(
            settings,
            name,
            (entrance.clone(), metrics.clone()),
            (ready, self.readiness.clone()),
            key,
        );
        let (talking, stop) = (replica.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("replicas", &metrics, stop, || {
                let replica = talking.clone();
                async move { replica.run().await }
            })
            .await;
            talking.farewell().await;
        });
        Ok(Some(replica))
    }

    /// Starts what feeds the fleet.
    pub(super) fn feed(
        &mut self,
        config: &Config,
        entrance: &Arc<Entrance>,
        feed: Arc<Feed>,
        envoys: Option<Arc<Envoys>>,
    ) -> anyhow::Result<()> {
        let metrics = self.reloader.metrics.clone();
        let (desired, sets) = mpsc::unbounded_channel();
        let (said, heard) = watch::channel(if config.learn.enabled {
            Arc::default()
        } else {
            learn::off()
        });
        let (entering, resync) = (entrance.clone(), SharedResync::default());
        resync.set(config.index_trust.resync);
        let announcer = Announcer::new(config.envoy.as_ref(), envoys, metrics.clone());
        let parts = keeper::Parts {
            entrance: entering,
            feed,
            metrics: metrics.clone(),
            said: heard,
            resync: resync.clone(),
            announcer,
            takeover: config
                .takeover
                .as_ref()
                .map(Takeover::new)
                .transpose()?
                .map(Arc::new),
        };
        let keeper = Keeper::new(config, parts, self.readiness.clone());
        self.learn(config, entrance.router(), said);
        self.background.spawn(keeper.run(sets, self.stop.clone()));
        let (wants, wanted) = watch::channel(Wanted::from(config));
        self.reloader.part("workers", move |next| {
            let (wants, next) = (wants.clone(), Wanted::from(&*next.config));
            Ok(Box::new(move || {
                wants.send_if_modified(|wanted| {
                    let news = *wanted != next;
                    *wanted = next;
                    news
                });
            }))
        });
        let router = entrance.router().clone();
        self.reloader.part("router", move |next| {
            let (router, settings, resync) = (
                router.clone(),
                next.config.router_settings(),
                resync.clone(),
            );
            Ok(Box::new(move || {
                resync.set(settings.trust.resync);
                router.set_settings(settings);
            }))
        });
        let (cluster, stop) = (self.reloader.cluster.clone(), self.stop.clone());
        self.background.spawn(async move {
            let follow = || {
                workers::follow(
                    wanted.clone(),
                    desired.clone(),
                    cluster.clone(),
                    metrics.clone(),
                )
            };
            supervise("workers", &metrics, stop, follow).await;
        });
        Ok(())
    }

    /// Starts what has to happen from time to time.
    pub(super) fn keep_time(&mut self, entrance: &Arc<Entrance>, metrics: &Arc<Metrics>) {
        let metrics_of_sweep = metrics.clone();
        let (waiting, metrics, stop) = (entrance.clone(), metrics.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("admission", &metrics, stop, || {
                let waiting = waiting.clone();
                async move {
                    waiting.admission().run().await;
                    Ok(())
                }
            })
            .await;
        });
        let (entrance, audit, stop) = (entrance.clone(), self.audit.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("sweep", &metrics_of_sweep, stop, || {
                sweep(entrance.clone(), audit.clone())
            })
            .await;
        });
    }

    /// Keeps in touch with those who are asked for the index.
    pub(super) fn keep_in_touch(&mut self) {
        let Some(asker) = self.reloader.asker.clone() else {
            return;
        };
        let (metrics, stop) = (self.reloader.metrics.clone(), self.stop.clone());
        self.background.spawn(async move {
            supervise("remote_index", &metrics, stop, || {
                let asker = asker.clone();
                async move { match asker.keep().await {} }
            })
            .await;
        });
    }

    /// Starts what tells engines of sessions, if they are to be told.
    pub(super) fn tell_engines(
        &mut self,
        config: &Config,
        entrance: &Arc<Entrance>,
        replica: Option<Arc<Replica>>,
    ) {
        let metrics = self.reloader.metrics.clone();
        let engine = config
            .sessions
            .as_ref()
            .and_then(|sessions| sessions.engine.clone());
        let (Some(engine), Some(sessions)) = (engine, entrance.sessions()) else {
            return;
        };
        let access = EngineAccess::new(&self.reloader.client(), &config.engines);
        let engines = EngineSessions::new(
            engine,
            access,
            sessions.clone(),
            entrance.router().clone(),
            metrics.clone(),
        );
        let renewed = engines.clone();
        self.reloader.part("engine_sessions", move |next| {
            let engines = renewed.clone();
            let access = EngineAccess::new(&next.client, &next.config.engines);
            Ok(Box::new(move || engines.set_access(access)))
        });
        let opener = engines.clone();
        entrance.on_open(engines.deadline(), move |rank, session| {
            let engines = opener.clone();
            let id = session.id.clone();
            let tenant = session.tenant.as_deref().map(Into::into);
            Box::pin(async move { engines.wait_until_open(rank, id, tenant).await })
        });
        let stop = self.stop.clone();
        self.background.spawn(async move {
            supervise("engine_sessions", &metrics, stop, || {
                let engines = engines.clone();
                async move {
                    engines.run().await;
                    Ok(())
                }
            })
            .await;
            // Our sessions end with us, and the next of us would open them anew; with others they go on.
            engines
                .close_all(FAREWELL, replica.is_some_and(|replica| replica.has_heirs()))
                .await;
        });
    }
}

/// Lets what has grown old expire, for ever.
async fn sweep(entrance: Arc<Entrance>, audit: Arc<Audit>) -> anyhow::Result<()> {
    let mut tick = tokio::time::interval(SWEEP);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        entrance.router().predictions().expire();
        audit.look(std::time::Instant::now());
        if let Some(sessions) = entrance.sessions() {
            sessions.expire();
        }
    }
}
