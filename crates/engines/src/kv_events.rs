//! KV events of the engines, from ZeroMQ messages (`warmroute_zmtp`) to index events. [`wire`]
//! decodes payloads, [`convert`] translates them into index events, and `sequencer` classifies
//! batch numbers. These three are pure. `applier` connects them to the sink and the metrics of one
//! worker rank. [`run`] is the only part that uses the network.

mod applier;
pub mod convert;
pub mod event_probe;
mod groups;
pub mod media;
mod replay;
mod replay_client;
mod resize;
mod sequencer;
mod source;
mod source_monitor;
mod source_outage;
mod subscriber;
pub mod wire;

pub use convert::{ConvertedEvent, EventNormalizer, FilterReason};
pub use media::MediaTokens;
pub use source::{RankSink, SharedResync, SourceSpec};
pub use source_monitor::SourceMonitor;
pub use subscriber::run;
