//! All body modes of Envoy with a real Envoy and a real warmroute: received bodies, responses while
//! warmroute fails, the duration of ext_proc streams, and gateway metadata. One Envoy has a
//! listener per case, each derived from the shipped one.

mod client;
mod failures;
mod gateway;
mod held;
mod hints;
mod refusals;
mod renamed;
mod stream_lifetimes;
mod upgrades;
mod uploads;
pub(crate) mod worker;
