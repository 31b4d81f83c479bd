//! Search for the rendering options of an engine whose tokens differ. Engines do not report these
//! options, but canaries reveal them.

use serde_json::{Map, Value, json};
use warmroute_tokens::openai;
use warmroute_tokens::prompt::{ContentFormatOption, Encoder, EngineKind, RenderOptions};

use super::ComparedCanary;

/// Template variables that engines are often started with.
const COMMON_VARIABLES: [&str; 2] = ["enable_thinking", "thinking"];

/// Returns the settings of the model with which the tokens of all canaries equal those of the
/// engine. Settings with few changes are preferred.
pub(super) async fn find_matching_settings(
    encoder: &Encoder,
    compared: &[ComparedCanary<'_>],
) -> Option<String> {
    let current = encoder
        .render_options()
        .filter(|_| encoder.engine() == EngineKind::Vllm)?;
    let mut options = alternatives(current);
    options.sort_by_key(|options| changed_settings(current, options).len());
    for options in options {
        if compared
            .iter()
            .all(|canary| has_equal_tokens(encoder, canary, &options))
        {
            return Some(changed_settings(current, &options).join(", "));
        }
        // Tokenization of all canaries takes some milliseconds.
        tokio::task::yield_now().await;
    }
    None
}

fn has_equal_tokens(
    encoder: &Encoder,
    compared: &ComparedCanary<'_>,
    options: &RenderOptions,
) -> bool {
    openai::parse(compared.canary.api, &compared.canary.body)
        .ok()
        .and_then(|request| encoder.encode_with_options(&request, options).ok())
        .is_some_and(|encoded| encoded.prompts == [&compared.theirs[..]])
}

/// Returns all other options that are tried.
fn alternatives(current: &RenderOptions) -> Vec<RenderOptions> {
    let configured = &current.default_chat_template_kwargs;
    let with_variable = |(name, value): (&str, bool)| {
        let mut defaults = configured.clone();
        defaults.insert(name.to_owned(), value.into());
        defaults
    };
    let variables = COMMON_VARIABLES.map(|name| [(name, false), (name, true)]);
    let mut defaults = vec![configured.clone(), Map::new()];
    defaults.extend(variables.into_iter().flatten().map(with_variable));
    let formats = [
        ContentFormatOption::Auto,
        ContentFormatOption::String,
        ContentFormatOption::Openai,
    ];
    let mut all = Vec::new();
    for default_chat_template_kwargs in defaults {
        for exclude_tools_when_tool_choice_none in [false, true] {
            all.extend(formats.map(|chat_template_content_format| RenderOptions {
                default_chat_template_kwargs: default_chat_template_kwargs.clone(),
                exclude_tools_when_tool_choice_none,
                chat_template_content_format,
            }));
        }
    }
    all.retain(|options| options != current);
    all
}

/// Returns the settings that differ, as written in the configuration.
fn changed_settings(from: &RenderOptions, to: &RenderOptions) -> Vec<String> {
    let as_settings = |options: &RenderOptions| -> [(&'static str, Value); 3] {
        let defaults = options.default_chat_template_kwargs.clone();
        [
            ("default_chat_template_kwargs", defaults.into()),
            (
                "exclude_tools_when_tool_choice_none",
                options.exclude_tools_when_tool_choice_none.into(),
            ),
            (
                "chat_template_content_format",
                json!(options.chat_template_content_format),
            ),
        ]
    };
    as_settings(from)
        .into_iter()
        .zip(as_settings(to))
        .filter(|(before, after)| before != after)
        .map(|(_, (key, value))| match value.as_str() {
            Some(text) => format!("{key}: {text}"),
            None => format!("{key}: {value}"),
        })
        .collect()
}
