//! Connection to one remote index server, with the last state of the worker ranks that it sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::{debug, warn};
use warmroute_core::block::BlockHashes;
use warmroute_core::router::{RemoteAnswer, RemoteRanks};

use super::config::RemoteIndexConfig;
use super::wire;
use crate::proto::index as pb;
use crate::proto::index::index_client::IndexClient;

/// Maximum size of a response in bytes: enough for the blocks of a prompt on a hundred thousand
/// worker ranks.
const MAX_ANSWER: usize = 16 << 20;

/// Connect timeout, and interval and timeout of keep-alive pings.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Connection to one server.
pub(super) struct ServerConnection {
    pub(super) url: String,
    pub(super) client: IndexClient<Channel>,
    /// Last reported state of the worker ranks. It is kept per server, because an event source can
    /// have a different status on each server.
    pub(super) last_ranks: ArcSwapOption<ServerRanks>,
    /// Set after the server refused a query, which is a configuration mismatch.
    has_refused: AtomicBool,
}

/// State of the worker ranks as reported by a server.
#[derive(Debug)]
pub(super) struct ServerRanks {
    pub(super) version: u64,
    pub(super) ranks: Arc<RemoteRanks>,
}

/// Reason why a query has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueryError {
    /// Too many concurrent queries.
    Busy,
    /// All servers are ejected.
    NoServer,
    /// The deadline passed.
    TimedOut,
    /// The server was unreachable, or its response was invalid.
    Failed,
    /// The server refused the query, for example because its blocks are incompatible.
    Refused,
}

impl QueryError {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            QueryError::Busy => "busy",
            QueryError::NoServer => "no_server",
            QueryError::TimedOut => "timeout",
            QueryError::Failed => "failed",
            QueryError::Refused => "incompatible",
        }
    }
}

/// Returns true if a healthy server refuses a query with this status code.
pub(super) fn is_rejection(code: Code) -> bool {
    use Code::{FailedPrecondition, InvalidArgument, OutOfRange, ResourceExhausted, Unimplemented};
    // These include the codes that tonic returns for an oversized message.
    matches!(
        code,
        FailedPrecondition | InvalidArgument | OutOfRange | ResourceExhausted | Unimplemented
    )
}

impl ServerConnection {
    pub(super) fn new(url: &str, settings: &RemoteIndexConfig) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint::from_shared(url.to_owned())?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        if url.starts_with("https://") {
            endpoint = endpoint.tls_config(settings.files().read()?)?;
        }
        let client =
            IndexClient::new(endpoint.connect_lazy()).max_decoding_message_size(MAX_ANSWER);
        Ok(Self {
            url: url.to_owned(),
            client,
            last_ranks: ArcSwapOption::empty(),
            has_refused: AtomicBool::new(false),
        })
    }

    /// Parses a response. `known` is the state of the worker ranks that the query referred to.
    pub(super) fn parse_answer(
        &self,
        answer: &pb::OverlapsResponse,
        known: Option<Arc<ServerRanks>>,
        queried: &[BlockHashes],
    ) -> Result<RemoteAnswer, wire::IndexMessageError> {
        let version = answer.ranks_version;
        let prompts = wire::decode_overlaps(&answer.prompts, queried)?;
        let last = self
            .last_ranks
            .load_full()
            .filter(|last| last.version == version);
        let ranks = match (&answer.ranks, last) {
            // Another response has delivered the state in the meantime.
            (_, Some(last)) => last.ranks.clone(),
            (Some(message), None) => {
                let ranks = Arc::new(wire::decode_ranks(message)?);
                self.last_ranks.store(Some(Arc::new(ServerRanks {
                    version,
                    ranks: ranks.clone(),
                })));
                ranks
            }
            (None, None) => {
                let same = known
                    .filter(|known| known.version == version)
                    .ok_or(wire::IndexMessageError::UnknownVersion(version))?;
                same.ranks.clone()
            }
        };
        self.has_refused.store(false, Ordering::Relaxed);
        Ok(RemoteAnswer { ranks, prompts })
    }

    pub(super) fn classify_status(&self, status: &Status) -> QueryError {
        let refused = is_rejection(status.code());
        // Logged once until the server responds again.
        if refused && !self.has_refused.swap(true, Ordering::Relaxed) {
            let code = status.code().description();
            let reason = status.message();
            warn!(
                server = self.url,
                code, reason, "remote index server refuses queries"
            );
        } else {
            debug!(server = self.url, %status, "remote index query failed");
        }
        if refused {
            QueryError::Refused
        } else {
            QueryError::Failed
        }
    }
}
