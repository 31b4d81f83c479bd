//! gRPC service of the index. It answers a query from the current index. It refuses a query whose
//! block hashes are not comparable with those of the index.
//!
//! Decision 0018.

use std::sync::Arc;

use parking_lot::Mutex;
use prost::Message as _;
use thiserror::Error;
use tonic::{Code, Request, Response, Status};
use warmroute_core::router::{RemoteRanks, Router};
use warmroute_core::worker::{BlockSize, ModelName};
use warmroute_metrics::{ApiCallLabels, Metrics};
use warmroute_runtime::lifecycle::Readiness;
use xxhash_rust::xxh3::xxh3_64;

use super::wire;
use crate::proto::index as pb;
use crate::proto::index::index_server::{Index, IndexServer};

/// A model whose index is served.
#[derive(Clone, Debug)]
pub struct IndexedModel {
    /// Model name.
    pub name: ModelName,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Hash of a fixed prompt, to compare the hashing of client and server.
    pub hashing: u64,
}

/// Finds a model by name. Without a name, it finds the only model.
pub type ModelLookup = Box<dyn Fn(Option<&str>) -> Option<IndexedModel> + Send + Sync>;

/// Dependencies of the service.
pub struct IndexServiceParts {
    /// Router with the index.
    pub router: Arc<Router>,
    /// Finds the model of a query.
    pub find_model: ModelLookup,
    /// Readiness of the server. It refuses queries while it starts or shuts down.
    pub readiness: Readiness,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Maximum number of blocks of all prompts in a query.
    pub max_blocks: usize,
}

/// The gRPC service. Clones share one state.
#[derive(Clone)]
pub struct IndexService(Arc<IndexServiceInner>);

struct IndexServiceInner {
    parts: IndexServiceParts,
    last_message: Mutex<Option<Arc<RanksMessage>>>,
}

/// The encoded state of the worker ranks.
struct RanksMessage {
    source: Arc<RemoteRanks>,
    version: u64,
    ranks: pb::Ranks,
}

/// Reason why a query is refused.
#[derive(Debug, Error)]
enum IndexQueryError {
    #[error(transparent)]
    Invalid(#[from] wire::IndexMessageError),
    #[error("the server is starting or shutting down")]
    NotReady,
    #[error("the model `{0}` is not served here")]
    UnknownModel(String),
    #[error(
        "the block size is {served} here and {queried} at the client; `block_size` must be equal"
    )]
    BlockSize { served: usize, queried: u32 },
    #[error(
        "prompts are hashed differently here (eagle, image_token, video_token or another version), \
        so the response would not match the prompts"
    )]
    Hashing,
}

impl IndexQueryError {
    fn code(&self) -> (Code, &'static str) {
        match self {
            IndexQueryError::Invalid(_) => (Code::InvalidArgument, "INVALID_ARGUMENT"),
            IndexQueryError::NotReady => (Code::Unavailable, "UNAVAILABLE"),
            IndexQueryError::UnknownModel(_)
            | IndexQueryError::BlockSize { .. }
            | IndexQueryError::Hashing => (Code::FailedPrecondition, "FAILED_PRECONDITION"),
        }
    }
}

impl IndexService {
    /// Creates a service.
    pub fn new(parts: IndexServiceParts) -> Self {
        Self(Arc::new(IndexServiceInner {
            parts,
            last_message: Mutex::default(),
        }))
    }

    /// Returns the service as a gRPC server.
    pub fn server(&self) -> IndexServer<IndexService> {
        let max_query = wire::max_query_bytes(self.0.parts.max_blocks);
        IndexServer::new(self.clone())
            .max_decoding_message_size(max_query)
            .max_encoding_message_size(usize::MAX)
    }

    fn answer_query(
        &self,
        request: pb::OverlapsRequest,
    ) -> Result<pb::OverlapsResponse, IndexQueryError> {
        let IndexServiceParts {
            router,
            find_model,
            readiness,
            max_blocks,
            ..
        } = &self.0.parts;
        if !readiness.is_ready() {
            return Err(IndexQueryError::NotReady);
        }
        let size = BlockSize::new(request.block_size).ok_or(wire::IndexMessageError::BlockSize)?;
        let name = Some(request.model.as_str()).filter(|name| !name.is_empty());
        let model =
            find_model(name).ok_or_else(|| IndexQueryError::UnknownModel(request.model.clone()))?;
        if model.block_size != size {
            return Err(IndexQueryError::BlockSize {
                served: model.block_size.tokens(),
                queried: request.block_size,
            });
        }
        if model.hashing != request.hashing {
            return Err(IndexQueryError::Hashing);
        }
        let prompts = wire::decode_prompts(request.prompts, size, *max_blocks)?;
        let answer = router.query_index(name.map(|_| &model.name), &prompts);
        let message = self.ranks_message(&answer.ranks);
        Ok(pb::OverlapsResponse {
            ranks_version: message.version,
            ranks: (request.known_ranks != message.version).then(|| message.ranks.clone()),
            prompts: answer
                .prompts
                .iter()
                .map(|found| wire::encode_overlaps(found))
                .collect(),
        })
    }

    /// Returns the encoded state of the worker ranks. It is cached until the state changes.
    fn ranks_message(&self, source: &Arc<RemoteRanks>) -> Arc<RanksMessage> {
        // Concurrent callers wait here instead of encoding the same state.
        let mut last = self.0.last_message.lock();
        if let Some(message) = last
            .as_ref()
            .filter(|message| Arc::ptr_eq(&message.source, source))
        {
            return message.clone();
        }
        let ranks = wire::encode_ranks(source);
        // The version is a content hash, so it is equal across processes. 0 means unknown.
        let version = xxh3_64(&ranks.encode_to_vec()).max(1);
        let message = Arc::new(RanksMessage {
            source: source.clone(),
            version,
            ranks,
        });
        *last = Some(message.clone());
        message
    }
}

#[tonic::async_trait]
impl Index for IndexService {
    async fn overlaps(
        &self,
        request: Request<pb::OverlapsRequest>,
    ) -> Result<Response<pb::OverlapsResponse>, Status> {
        let answer = self.answer_query(request.into_inner());
        let code = answer
            .as_ref()
            .err()
            .map_or("OK", |refusal| refusal.code().1);
        self.0
            .parts
            .metrics
            .api
            .calls
            .get_or_create(&ApiCallLabels {
                method: "Overlaps",
                code,
            })
            .inc();
        match answer {
            Ok(answer) => Ok(Response::new(answer)),
            Err(refusal) => Err(Status::new(refusal.code().0, refusal.to_string())),
        }
    }
}
