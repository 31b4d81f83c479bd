//! Plans and runs remote prefills, so that no sidecar is needed. There are three modes. `header`
//! sets the headers of the prefill worker. `mirror` sends the request to both workers with a
//! bootstrap room. `call` calls the prefill worker first and passes its KV transfer parameters to
//! the decode worker. The router chooses the workers.

mod aborts;
mod bootstrap;
mod client;
mod clients;
mod config;
mod fallback;
mod handoff;
mod headers;
mod mirror;
mod plan;
mod retry;

pub use aborts::AbortClient;
pub use client::{PrefillCall, PrefillClient, PrefillError};
pub use clients::PrefillClients;
pub use config::{KvTransferProtocol, PrefillConfig, PrefillMode};
pub use fallback::SequentialPrefill;
pub use handoff::{
    HandoffError, KvHandoff, PrefillBody, PrefillResponse, SplitError, StrippedBody,
    strip_kv_fields,
};
pub use headers::ClientHeaders;
pub use mirror::{
    BootstrapPair, MirrorContext, MirrorTarget, MirroredPrefill, PrefillEvent, PrefillMirror,
};
pub use plan::{PrefillExecutor, PrefillPlanner, UncheckedBodyError};
pub(crate) use plan::{PrefillOutcome, PrefillPlan};
pub use retry::{PrefillInput, PrefillRecord, RemotePrefill};
