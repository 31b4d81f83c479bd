//! Carries out a prefill that was decided to be another worker's than the decode, so that no sidecar has to: by naming the
//! prefill worker and nothing else, by giving both workers the same request with a room to meet in, or by asking the
//! prefill worker first and handing what it says to the decode worker. Who they are is the router's to decide.

mod aborts;
mod again;
mod call;
mod config;
mod handover;
mod headers;
mod ladder;
mod meeting;
mod mirror;
mod report;

pub use aborts::Aborts;
pub use again::{Called, Copy, Retried};
pub use call::{Asked, Caller, Failure};
pub use config::{By, PrefillConfig, Protocol};
pub use handover::{Cleaned, HandedOver, Handing, NotHandedOver, Question, Unfit, clean, path};
pub use headers::forwarded;
pub(crate) use ladder::note;
pub use ladder::{Call, Carried, Wanted};
pub use meeting::{fits, streams};
pub use mirror::{Given, Met, Mirror, Mirrored, Turn};
