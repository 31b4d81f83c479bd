//! What a request leaves to the engines, as far as all engines of its model say the same.

use super::{Intake, Named};
use crate::learned::Agreed;
use crate::openai;
use crate::prompt::Engine;

/// Most tokens of a prompt if no engine reports the length of its model.
const MOST_TOKENS: usize = 1 << 20;

impl Intake {
    /// Most tokens of a prompt that are computed and hashed. No engine accepts a longer prompt.
    pub(super) fn most_tokens(&self, named: &Named) -> usize {
        let longest = self.agreed(named, |agreed| agreed.max_model_len);
        longest.map_or(MOST_TOKENS, |longest| {
            usize::try_from(longest).unwrap_or(usize::MAX)
        })
    }

    /// Something that the engines of a model say alike.
    pub(super) fn agreed<T>(&self, named: &Named, of: impl Fn(&Agreed) -> Option<T>) -> Option<T> {
        let source = self.parts.tokens.get(&named.model.name)?;
        source.agreed.load().get(&named.model.name).and_then(of)
    }

    /// Says in tokens how long a prompt may be that is to be cut to what the model takes, where that is known.
    pub(super) fn measure(&self, named: &Named, request: &mut openai::Request) {
        let is_vllm = || {
            named
                .model
                .encoder
                .as_ref()
                .is_none_or(|encoder| encoder.engine() == Engine::Vllm)
        };
        let longest = self
            .agreed(named, |agreed| agreed.max_model_len)
            .filter(|_| is_vllm());
        if let Some(longest) = longest {
            request.measure(longest);
        }
    }
}
