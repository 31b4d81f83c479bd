//! Serving the index: a question is answered from what the index holds at that moment, or refused where an answer would be
//! about something else than was asked.

use std::sync::Arc;

use parking_lot::Mutex;
use prost::Message as _;
use thiserror::Error;
use tonic::{Code, Request, Response, Status};
use xxhash_rust::xxh3::xxh3_64;

use super::pb::index_server::{Index, IndexServer};
use super::{pb, wire};
use crate::lifecycle::Readiness;
use crate::metrics::{CallLabels, Metrics};
use crate::router::{RemoteRanks, Router};
use crate::worker::{BlockSize, ModelName};

/// A model as it is served here.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// Its name.
    pub name: ModelName,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// What its way of hashing makes of the prompt that everybody knows.
    pub hashing: u64,
}

/// Finds a model by its name; without one the model, where there is only one.
pub type FindModel = Box<dyn Fn(Option<&str>) -> Option<ServedModel> + Send + Sync>;

/// What the service is made of.
pub struct Parts {
    /// Whose index it is.
    pub router: Arc<Router>,
    /// What is served.
    pub find: FindModel,
    /// Who is not ready knows too little, and who is leaving is about to.
    pub readiness: Readiness,
    /// Measures.
    pub metrics: Arc<Metrics>,
    /// Most blocks of all prompts of a question.
    pub most_blocks: usize,
}

/// The service. A clone is the same service.
#[derive(Clone)]
pub struct ServedIndex(Arc<Shared>);

struct Shared {
    parts: Parts,
    said: Mutex<Option<Arc<Said>>>,
}

/// What is said of the worker ranks, as a message.
struct Said {
    of: Arc<RemoteRanks>,
    version: u64,
    ranks: pb::Ranks,
}

/// Why a question is not answered.
#[derive(Debug, Error)]
enum Refusal {
    #[error(transparent)]
    Nonsense(#[from] wire::Nonsense),
    #[error("this server is starting or leaving")]
    NotReady,
    #[error("the model `{0}` is not served here")]
    UnknownModel(String),
    #[error(
        "its blocks have {here} tokens here, and {asked} where it is asked from; `block_size` has to be the same"
    )]
    BlockSize { here: usize, asked: u32 },
    #[error(
        "its prompts are hashed in another way here (eagle, image_token, video_token or another version), so an answer would \
         be about other prompts"
    )]
    Hashing,
}

impl Refusal {
    fn code(&self) -> (Code, &'static str) {
        match self {
            Refusal::Nonsense(_) => (Code::InvalidArgument, "INVALID_ARGUMENT"),
            Refusal::NotReady => (Code::Unavailable, "UNAVAILABLE"),
            Refusal::UnknownModel(_) | Refusal::BlockSize { .. } | Refusal::Hashing => {
                (Code::FailedPrecondition, "FAILED_PRECONDITION")
            }
        }
    }
}

impl ServedIndex {
    /// A service of these parts.
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(Shared {
            parts,
            said: Mutex::default(),
        }))
    }

    /// The same as a gRPC server.
    pub fn server(&self) -> IndexServer<ServedIndex> {
        let longest = wire::longest(self.0.parts.most_blocks);
        IndexServer::new(self.clone())
            .max_decoding_message_size(longest)
            .max_encoding_message_size(usize::MAX)
    }

    fn answer(&self, asked: pb::OverlapsRequest) -> Result<pb::OverlapsResponse, Refusal> {
        let Parts {
            router,
            find,
            readiness,
            most_blocks,
            ..
        } = &self.0.parts;
        if !readiness.is_ready() {
            return Err(Refusal::NotReady);
        }
        let size = BlockSize::new(asked.block_size).ok_or(wire::Nonsense::BlockSize)?;
        let name = Some(asked.model.as_str()).filter(|name| !name.is_empty());
        let model = find(name).ok_or_else(|| Refusal::UnknownModel(asked.model.clone()))?;
        if model.block_size != size {
            return Err(Refusal::BlockSize {
                here: model.block_size.tokens(),
                asked: asked.block_size,
            });
        }
        if model.hashing != asked.hashing {
            return Err(Refusal::Hashing);
        }
        let prompts = wire::prompts(asked.prompts, size, *most_blocks)?;
        let answer = router.answer(name.map(|_| &model.name), &prompts);
        let said = self.said(&answer.ranks);
        Ok(pb::OverlapsResponse {
            ranks_version: said.version,
            ranks: (asked.known_ranks != said.version).then(|| said.ranks.clone()),
            prompts: answer
                .prompts
                .iter()
                .map(|found| wire::held(found))
                .collect(),
        })
    }

    /// What is said of the worker ranks, made once for as long as nothing changes.
    fn said(&self, of: &Arc<RemoteRanks>) -> Arc<Said> {
        // While it is made, others wait who would make the same.
        let mut last = self.0.said.lock();
        if let Some(said) = last.as_ref().filter(|said| Arc::ptr_eq(&said.of, of)) {
            return said.clone();
        }
        let ranks = wire::said(of);
        // The hash of what it says: it holds beyond this process, and 0 says that none is known.
        let version = xxh3_64(&ranks.encode_to_vec()).max(1);
        let said = Arc::new(Said {
            of: of.clone(),
            version,
            ranks,
        });
        *last = Some(said.clone());
        said
    }
}

#[tonic::async_trait]
impl Index for ServedIndex {
    async fn overlaps(
        &self,
        asked: Request<pb::OverlapsRequest>,
    ) -> Result<Response<pb::OverlapsResponse>, Status> {
        let answer = self.answer(asked.into_inner());
        let code = answer
            .as_ref()
            .err()
            .map_or("OK", |refusal| refusal.code().1);
        self.0
            .parts
            .metrics
            .api_calls
            .get_or_create(&CallLabels {
                call: "Overlaps",
                code,
            })
            .inc();
        match answer {
            Ok(answer) => Ok(Response::new(answer)),
            Err(refusal) => Err(Status::new(refusal.code().0, refusal.to_string())),
        }
    }
}
