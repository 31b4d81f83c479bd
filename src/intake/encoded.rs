//! A body as far as it could be read. It begins as a guess from its length, and keeps what is found out, so that wherever
//! reading ends something sensible is left.

use std::sync::Arc;
use std::time::Duration;

use super::{Models, Named, Told};
use crate::block::SequenceHash;
use crate::openai::{self, Api, Extension, Shape};
use crate::parity::Foretold;
use crate::router::{Prompt, Reason};
use crate::worker::ModelName;

/// Bytes of a body per token where nothing better is known; English and code lie between 3 and 5.
const BYTES_PER_TOKEN: u64 = 4;

/// Most tokens that are estimated from bytes: as many as large models take. A guess must not keep a worker busy for longer
/// than any prompt could.
pub(super) const MOST_ESTIMATED: u64 = 131_072;

/// A body as far as it could be read.
pub(super) struct Encoded {
    pub(super) asked_model: Option<String>,
    pub(super) model: Option<ModelName>,
    pub(super) adapter: Option<String>,
    pub(super) prompt: Prompt,
    /// Whether we made its tokens from text.
    pub(super) ours: bool,
    /// Whether an image or the like is among them.
    pub(super) illustrated: bool,
    pub(super) foretold: Foretold,
    pub(super) tracked: Option<Vec<Arc<[SequenceHash]>>>,
    pub(super) tokens: Vec<Vec<u32>>,
    pub(super) extension: Option<Box<Extension>>,
    pub(super) session: Option<String>,
    /// What is wrong with it.
    pub(super) unreadable: Option<String>,
    pub(super) times: Vec<(&'static str, Duration)>,
}

impl Encoded {
    pub(super) fn unread(tokens: u64, because: Reason) -> Self {
        let prompt = Prompt::Estimated { tokens, because };
        let times = Vec::with_capacity(4);
        Self {
            asked_model: None,
            model: None,
            adapter: None,
            prompt,
            ours: false,
            illustrated: false,
            foretold: Foretold::Nothing,
            tracked: None,
            tokens: vec![],
            extension: None,
            session: None,
            unreadable: None,
            times,
        }
    }

    /// What separates this client's cache from others'. What else its body says to routers is kept, if it is to be believed.
    pub(super) fn salt(
        &mut self,
        told: &Told,
        request: &mut openai::Request,
        trusted: bool,
    ) -> Option<String> {
        let raw = request.extension.take().filter(|_| trusted);
        self.extension = raw.map(|raw| Box::new(Extension::read(&raw)));
        let in_extension = self
            .extension
            .as_ref()
            .and_then(|extension| extension.cache_salt.clone());
        told.tenant
            .clone()
            .or(in_extension)
            .or(request.cache_salt.take())
    }

    /// A request whose body was not read, and why.
    pub(super) fn without(api: Api, bytes: usize, because: Reason) -> Self {
        match api.shape() {
            // Whatever is wrong with it, it is no work.
            Shape::NoPrompt => Self::unread(0, Reason::NotInference),
            Shape::Prompt | Shape::LoadOnly if api.is_text() => {
                Self::unread(estimate(bytes), because)
            }
            Shape::Prompt | Shape::LoadOnly => Self::unread(0, because),
        }
    }

    /// Notes the model that is asked for, and what it stands for, if it is served.
    pub(super) fn asks(&mut self, asked: Option<String>, models: &Models) -> Option<Named> {
        let named = models.find(asked.as_deref());
        self.asked_model = asked;
        self.model = named.as_ref().map(|named| named.model.name.clone());
        self.adapter = named.as_ref().and_then(|named| named.adapter.clone());
        named
    }

    /// The same request with a body above the limit, of which no more is used than the first blocks.
    pub(super) fn too_large(mut self) -> Self {
        let because = Reason::BodyTooLarge;
        let tokens = self.prompt.tokens();
        self.prompt = match self.prompt {
            Prompt::Hashed(mut prompts) if prompts.len() == 1 => match prompts.pop() {
                Some(known) => Prompt::Beginning {
                    known,
                    tokens,
                    because,
                },
                None => Prompt::Estimated { tokens, because },
            },
            Prompt::Beginning { known, tokens, .. } => Prompt::Beginning {
                known,
                tokens,
                because,
            },
            none @ Prompt::Estimated {
                because: Reason::NotInference | Reason::UnknownModel,
                ..
            } => none,
            Prompt::Hashed(_) | Prompt::Estimated { .. } => Prompt::Estimated { tokens, because },
        };
        self.tokens = Vec::new();
        self
    }

    pub(super) fn fail(&mut self, reason: Reason) {
        if let Prompt::Estimated { because, .. } = &mut self.prompt {
            *because = reason;
        }
    }
}

/// Tokens in a body of which only the length is known.
pub(super) fn estimate(bytes: usize) -> u64 {
    (bytes as u64 / BYTES_PER_TOKEN).min(MOST_ESTIMATED)
}
