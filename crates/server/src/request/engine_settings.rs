//! Settings that all engines of a model report with the same value.

use warmroute_core::engine_settings::CommonSettings;
use warmroute_tokens::openai;
use warmroute_tokens::prompt::EngineKind;

use super::models::ResolvedModel;
use super::preprocessor::RequestPreprocessor;

/// Maximum number of tokens of a prompt if no engine reports its context length.
const DEFAULT_MAX_TOKENS: usize = 1 << 20;

impl RequestPreprocessor {
    /// Returns the maximum number of tokens of a prompt that are computed and hashed. No engine
    /// accepts a longer prompt.
    pub(super) fn max_prompt_tokens(&self, resolved: &ResolvedModel) -> usize {
        let max_length = self.common_setting(resolved, |settings| settings.max_model_len);
        max_length.map_or(DEFAULT_MAX_TOKENS, |max_length| {
            usize::try_from(max_length).unwrap_or(usize::MAX)
        })
    }

    /// Returns a setting that all engines of a model report with the same value.
    pub(super) fn common_setting<T>(
        &self,
        resolved: &ResolvedModel,
        setting: impl Fn(&CommonSettings) -> Option<T>,
    ) -> Option<T> {
        let source = self.parts.token_sources.get(&resolved.model.name)?;
        source
            .engine_settings
            .load()
            .get(&resolved.model.name)
            .and_then(setting)
    }

    /// Sets the token limit for a prompt that is truncated to the context length of the model, if
    /// it is known.
    pub(super) fn set_max_length(
        &self,
        resolved: &ResolvedModel,
        request: &mut openai::ApiRequest,
    ) {
        let is_vllm = || {
            resolved
                .model
                .encoder
                .as_ref()
                .is_none_or(|encoder| encoder.engine() == EngineKind::Vllm)
        };
        let max_length = self
            .common_setting(resolved, |settings| settings.max_model_len)
            .filter(|_| is_vllm());
        if let Some(max_length) = max_length {
            request.resolve_truncation(max_length);
        }
    }
}
