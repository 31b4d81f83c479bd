//! What a request leaves to the engines, as far as all engines of its model say the same.

use super::{Intake, Named};
use crate::learned::Agreed;
use crate::openai;
use crate::prompt::Engine;

impl Intake {
    /// Something that the engines of a model say alike.
    pub(super) fn agreed<T>(&self, named: &Named, of: impl Fn(&Agreed) -> Option<T>) -> Option<T> {
        let source = self.parts.tokens.get(&named.model.name)?;
        source.agreed.load().get(&named.model.name).and_then(of)
    }

    /// Says in tokens how long a prompt may be that is to be cut to what the model takes, where that is known.
    pub(super) fn measure(&self, named: &Named, request: &mut openai::Request) {
        let is_vllm = || named.model.encoder.as_ref().is_none_or(|encoder| encoder.engine() == Engine::Vllm);
        if request.tokenization.truncate_prompt_tokens != Some(-1) || !is_vllm() {
            return;
        }
        let Some(longest) = self.agreed(named, |agreed| agreed.max_model_len) else { return };
        let room = match request.max_output_tokens {
            None | Some(0) => longest,
            // vLLM keeps one token back for an answer whose length was asked for.
            Some(_) => longest.saturating_sub(1),
        };
        // Where no room is left, the engine decides what is wrong with the request.
        request.tokenization.truncate_prompt_tokens = i64::try_from(room).ok().filter(|room| *room > 0).or(Some(-1));
    }
}
