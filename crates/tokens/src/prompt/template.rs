//! Chat templates. A template that might render differently from Jinja2 is rejected at load with
//! the unsupported feature. Rendering has limited fuel, so no request runs a template forever.

mod checkpoints;
mod request_support;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memchr::memmem;
use minijinja::machinery::{WhitespaceConfig, parse};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::content_format::{self, ContentFormat};
use super::conversation::{self, TemplateMessage};
use super::direct::{DirectRenderer, RenderOutput};
use super::engine::{ContentFormatOption, EngineKind, RenderOptions};
use super::error::EncodeError;
use super::inline_systems::InlineSystemMode;
use super::media_renderer::{MediaDisplay, MediaRenderer};
use super::model_files::{LoadError, TemplateSources};
use super::python::{self, POISON, PythonDict};
use super::python_methods::{self, TemplateClock};
use super::{continuation, sglang, template_support};
use crate::openai::{ChatPrompt, JsonValue};
pub(super) use checkpoints::RenderedChat;
use checkpoints::can_resume;
use request_support::{check_supported, is_kwarg_set, tools_of_kwargs};

/// Maximum number of template instructions. They suffice for thousands of messages, and take about
/// a second.
const FUEL: u64 = 20_000_000;

/// Certainty that the engine computes the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenExactness {
    /// The engine computes these tokens.
    Exact,
    /// The template reads the time. The tokens are exact only while the engine's clock and time
    /// zone agree with those of this process.
    ClockDependent,
}

/// Chat templates of a model.
#[derive(Clone)]
pub(super) struct ChatTemplates {
    named: Arc<BTreeMap<String, CompiledTemplate>>,
    inline_systems: InlineSystemMode,
    special_tokens: Vec<(&'static str, String)>,
    engine: EngineKind,
    /// Template variables of requests that do not set them.
    default_kwargs: Vec<(String, JsonValue)>,
    options: RenderOptions,
}

impl fmt::Debug for ChatTemplates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.named.keys()).finish()
    }
}

impl ChatTemplates {
    pub(super) fn compile(
        sources: TemplateSources,
        special_tokens: Vec<(&'static str, String)>,
        now: impl Fn() -> jiff::Zoned + Send + Sync + 'static,
    ) -> Result<Self, LoadError> {
        let now: TemplateClock = Arc::new(now);
        let mut named = BTreeMap::new();
        for (name, source) in sources.named {
            let template = CompiledTemplate::compile(&source, &now).map_err(|problem| {
                LoadError::Template {
                    path: sources.path.clone(),
                    name: name.clone(),
                    problem,
                }
            })?;
            named.insert(name, template);
        }
        let inline_systems =
            InlineSystemMode::combine(|name| Some(named.get(name)?.inline_systems));
        Ok(Self {
            named: Arc::new(named),
            inline_systems,
            special_tokens,
            engine: EngineKind::Vllm,
            default_kwargs: Vec::new(),
            options: RenderOptions::default(),
        })
    }

    /// Returns the templates with the rendering rules of `engine` and its options.
    pub(super) fn with_engine(self, engine: EngineKind, options: &RenderOptions) -> Self {
        let default = |(name, value): (&String, &serde_json::Value)| {
            // The text of a JSON value is JSON. What only Python can read is unknown.
            let value = JsonValue::parse(&value.to_string());
            let unknown = JsonValue::Unknown("a default of chat_template_kwargs");
            (name.clone(), value.unwrap_or(unknown))
        };
        let kwargs = options.default_chat_template_kwargs.iter();
        Self {
            engine,
            default_kwargs: kwargs.map(default).collect(),
            options: options.clone(),
            ..self
        }
    }

    /// Returns the rendering options of the engine.
    pub(super) fn options(&self) -> &RenderOptions {
        &self.options
    }

    /// Returns the content format that the engine passes to a template.
    fn format_for(&self, template: &CompiledTemplate) -> ContentFormat {
        match self.options.chat_template_content_format {
            ContentFormatOption::Auto => template.format,
            ContentFormatOption::String => ContentFormat::Text,
            ContentFormatOption::Openai => ContentFormat::Parts,
        }
    }

    /// Returns the tools of a request that its prompt contains.
    fn offered_tools<'c>(&self, chat: &'c ChatPrompt) -> Option<&'c [JsonValue]> {
        let is_none = chat.tool_choice.as_ref().and_then(JsonValue::as_str) == Some("none");
        chat.tools
            .as_deref()
            .filter(|_| !(is_none && self.options.exclude_tools_when_tool_choice_none))
    }

    /// Renders the prompt of a conversation without media.
    pub(super) fn render(
        &self,
        chat: &ChatPrompt,
    ) -> Result<(String, TokenExactness), EncodeError> {
        let rendered = self.render_as(chat, MediaDisplay::Rejected, &[])?;
        Ok((rendered.text, rendered.exactness))
    }

    /// Returns true if the template of a conversation takes lists of parts.
    pub(super) fn takes_parts(&self, chat: &ChatPrompt) -> Result<bool, EncodeError> {
        Ok(self.format_for(self.template_for(chat)?) == ContentFormat::Parts)
    }

    fn template_for(&self, chat: &ChatPrompt) -> Result<&CompiledTemplate, EncodeError> {
        let has_tools = self.offered_tools(chat).is_some() || tools_of_kwargs(chat).is_some();
        let with_tools = self.named.get("tool_use").filter(|_| has_tools);
        with_tools
            .or_else(|| self.named.get("default"))
            .ok_or(EncodeError::NoTemplate)
    }

    /// Renders the prompt of a conversation. `show` selects the treatment of media items. Also
    /// returns the last checkpoint of each requested prefix, if there is one. `prefix_lengths` are
    /// the lengths of these prefixes in messages.
    pub(super) fn render_as(
        &self,
        chat: &ChatPrompt,
        show: MediaDisplay<'_>,
        prefix_lengths: &[usize],
    ) -> Result<RenderedChat, EncodeError> {
        check_supported(chat)?;
        let template = self.template_for(chat)?;
        if self.engine == EngineKind::Sglang {
            return self.render_for_sglang(template, chat);
        }
        template.check_thinking_switch(chat)?;
        let messages = self.inline_systems.arrange_messages(chat)?;
        let mut turns = conversation::template_messages(
            &messages,
            self.format_for(template),
            0,
            &mut MediaRenderer::new(show),
        )?;
        let prefix_lengths = if can_resume(chat, &turns) {
            prefix_lengths
        } else {
            &[]
        };
        if !template.has_developer_role && turns.iter().any(|turn| turn.role == "developer") {
            turns = conversation::merge_developer_messages(turns);
        }
        template.check_reasoning_field(&turns)?;
        let continued = chat
            .continue_final_message
            .then(|| continuation::mark_last_message(&mut turns))
            .transpose()?;
        let mut rendered = template.render_turns(turns, self.variables(chat)?, prefix_lengths)?;
        if let Some(message) = continued {
            if !template.reads_content {
                return Err(EncodeError::rejected("the template reads no content"));
            }
            rendered.text = continuation::truncate_at_mark(rendered.text, &message)?;
        }
        Ok(rendered)
    }

    /// Returns the output of the direct renderer, if it supports the conversation, and of
    /// minijinja. Returns `None` if the conversation is rejected before rendering.
    #[cfg(test)]
    pub(super) fn render_both(
        &self,
        chat: &ChatPrompt,
    ) -> Option<(Option<String>, Result<String, EncodeError>)> {
        let template = self.template_for(chat).ok()?;
        let turns = || {
            conversation::template_messages(
                &chat.messages,
                self.format_for(template),
                0,
                &mut MediaRenderer::new(MediaDisplay::Rejected),
            )
            .ok()
        };
        let mut variables = self.variables(chat).ok()?;
        let direct = template.direct.render(&turns()?, &variables, None, &[]);
        let direct = direct.map(|output| output.text);
        variables.insert("messages", conversation::into_value(turns()?));
        let rendered = template.render(PythonDict::from_iter(variables).into_value());
        Some((direct, rendered.map(|rendered| rendered.text)))
    }

    fn render_for_sglang(
        &self,
        template: &CompiledTemplate,
        chat: &ChatPrompt,
    ) -> Result<RenderedChat, EncodeError> {
        sglang::check_supported(chat)?;
        if self.named.len() > 1 {
            return Err(EncodeError::uncertain(
                "SGLang uses the first of several templates",
            ));
        }
        let special = self
            .special_tokens
            .iter()
            .map(|(name, token)| ((*name).to_owned(), Value::from(token.as_str())));
        let mut variables: BTreeMap<String, Value> = special.collect();
        variables.extend(sglang::template_variables(chat)?);
        let turns = sglang::template_messages(chat, template.sglang_format)?;
        let variables = variables
            .iter()
            .map(|(name, value)| (name.as_str(), value.clone()))
            .collect();
        match template.render_turns(turns, variables, &[]) {
            // SGLang retries with tools in another format.
            Err(EncodeError::Render(_)) if chat.tools.is_some() => Err(EncodeError::uncertain(
                "SGLang renders again if the template fails",
            )),
            rendered => rendered,
        }
    }

    /// Returns all template variables except the messages; later entries override earlier ones.
    fn variables<'c>(
        &'c self,
        chat: &'c ChatPrompt,
    ) -> Result<BTreeMap<&'c str, Value>, EncodeError> {
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        variables.extend(
            self.special_tokens
                .iter()
                .map(|(name, token)| (*name, Value::from(token.as_str()))),
        );
        variables.insert("documents", Value::from(()));
        let defaults = self.default_kwargs.iter().filter(|_| !chat.is_pooling);
        for (name, value) in defaults {
            variables.insert(name, python::comparable_value(value)?);
        }
        // Tools are added below, because templates do not compare their numbers and only print
        // them.
        let kwargs = chat
            .chat_template_kwargs
            .iter()
            .filter(|(name, value)| *name != "tools" && is_kwarg_set(value));
        for (name, value) in kwargs {
            variables.insert(name, python::comparable_value(value)?);
        }
        if let Some(effort) = chat
            .reasoning_effort
            .as_deref()
            .filter(|effort| *effort != "auto")
        {
            variables.insert("reasoning_effort", Value::from(effort));
            if !chat.chat_template_kwargs.contains_key("enable_thinking") {
                variables.insert("enable_thinking", Value::from(effort != "none"));
            }
        }
        if let Some(documents) = &chat.documents {
            let documents = documents
                .iter()
                .map(python::value)
                .collect::<Result<_, _>>()?;
            variables.insert("documents", python::list(documents));
        }
        let tools = match tools_of_kwargs(chat) {
            Some(JsonValue::Array(tools)) if tools.iter().all(JsonValue::is_object) => {
                python::list(tools.iter().map(python::value).collect::<Result<_, _>>()?)
            }
            Some(_) => {
                return Err(EncodeError::uncertain(
                    "`tools` in chat_template_kwargs that are no list of objects",
                ));
            }
            None => self
                .offered_tools(chat)
                .map(conversation::template_tools)
                .transpose()?
                .unwrap_or(Value::from(())),
        };
        variables.insert("tools", tools);
        variables.insert(
            "add_generation_prompt",
            Value::from(chat.add_generation_prompt),
        );
        Ok(variables)
    }
}

/// A compiled template.
pub(super) struct CompiledTemplate {
    env: Environment<'static>,
    format: ContentFormat,
    sglang_format: Option<ContentFormat>,
    has_developer_role: bool,
    reads_content: bool,
    /// True if the template reads a switch for reasoning.
    has_thinking_switch: bool,
    /// True if the template reads `thinking`. The name of the reasoning field depends on the
    /// transformers version.
    reads_thinking_field: bool,
    reads_clock: bool,
    inline_systems: InlineSystemMode,
    direct: DirectRenderer,
}

/// Name of the template in its environment.
const TEMPLATE_NAME: &str = "chat_template";

impl CompiledTemplate {
    fn compile(written: &str, now: &TemplateClock) -> Result<Self, String> {
        let source = without_generation_tags(written);
        let whitespace = WhitespaceConfig {
            keep_trailing_newline: false,
            lstrip_blocks: true,
            trim_blocks: true,
        };
        let tree = parse(&source, TEMPLATE_NAME, Default::default(), whitespace)
            .map_err(|error| error.to_string())?;
        template_support::check_supported(&tree)?;
        let format = content_format::content_format(&tree);
        let format_in_sglang = sglang::content_format(&tree, &source);
        let mut env = environment(now);
        env.add_template_owned(TEMPLATE_NAME, source.clone())
            .map_err(|error| error.to_string())?;
        let holds = |words: &[&str]| words.iter().any(|word| source.contains(word));
        Ok(Self {
            format,
            sglang_format: format_in_sglang,
            has_thinking_switch: holds(&["reasoning_effort", "enable_thinking"]),
            has_developer_role: holds(&["\"developer\"", "'developer'"]),
            reads_content: holds(&["content"]),
            reads_thinking_field: holds(&[".thinking", "'thinking'", "\"thinking\""]),
            reads_clock: holds(&["strftime_now"]),
            // vLLM's probe fails for a template with `generation` tags, which plain Jinja2 rejects.
            inline_systems: if source == written {
                InlineSystemMode::probe(&env, TEMPLATE_NAME)
            } else {
                InlineSystemMode::Merged
            },
            direct: DirectRenderer::compile(&tree, now),
            env,
        })
    }

    fn check_thinking_switch(&self, chat: &ChatPrompt) -> Result<(), EncodeError> {
        if self.has_thinking_switch && chat.is_thinking_disabled {
            return Err(EncodeError::uncertain(
                "the reasoning effort that disables reasoning, which engines probe",
            ));
        }
        Ok(())
    }

    fn check_reasoning_field(&self, turns: &[TemplateMessage<'_>]) -> Result<(), EncodeError> {
        if self.reads_thinking_field && turns.iter().any(TemplateMessage::has_reasoning) {
            return Err(EncodeError::uncertain("the template reads `thinking`"));
        }
        Ok(())
    }

    fn render_turns(
        &self,
        turns: Vec<TemplateMessage<'_>>,
        mut variables: BTreeMap<&str, Value>,
        prefix_lengths: &[usize],
    ) -> Result<RenderedChat, EncodeError> {
        if let Some(output) = self.direct.render(&turns, &variables, None, prefix_lengths) {
            return self.check_rendered(output);
        }
        variables.insert("messages", conversation::into_value(turns));
        self.render(PythonDict::from_iter(variables).into_value())
    }

    fn exactness(&self) -> TokenExactness {
        if self.reads_clock {
            TokenExactness::ClockDependent
        } else {
            TokenExactness::Exact
        }
    }

    fn render(&self, variables: Value) -> Result<RenderedChat, EncodeError> {
        let text = render_in(&self.env, variables)?;
        let checkpoints = Vec::new();
        self.check_rendered(RenderOutput { text, checkpoints })
    }

    /// Returns a rendered text, or an error if it contains [`POISON`].
    fn check_rendered(&self, output: RenderOutput) -> Result<RenderedChat, EncodeError> {
        let RenderOutput { text, checkpoints } = output;
        if memmem::find(text.as_bytes(), POISON.as_bytes()).is_some() {
            return Err(EncodeError::uncertain(
                "a value that only the engine prints exactly",
            ));
        }
        Ok(RenderedChat {
            text,
            exactness: self.exactness(),
            checkpoints,
        })
    }
}

fn render_in(env: &Environment<'_>, variables: Value) -> Result<String, EncodeError> {
    let render = || {
        env.get_template(TEMPLATE_NAME)
            .and_then(|template| template.render(variables))
    };
    // minijinja 2.24 panics on some slices (`''[::-1]`) of text that clients control.
    catch_unwind(AssertUnwindSafe(render))
        .map_err(|_| EncodeError::Render("the template engine panicked".to_owned()))?
        .map_err(|error| EncodeError::Render(error.to_string()))
}

/// Creates an environment with the Jinja2 settings of transformers.
fn environment(now: &TemplateClock) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    python_methods::install(&mut env);
    env.add_function("raise_exception", |message: &str| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
    });
    let now = Arc::clone(now);
    env.add_function("strftime_now", move |format: &str| {
        python_methods::strftime(&now, format)
    });
    env
}

/// Replaces the tags `generation` and `endgeneration`. They mark text for training and have no
/// effect on rendering.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let end = rest[start..]
            .find("%}")
            .map_or(rest.len(), |length| start + length + 2);
        let tag = &rest[start..end];
        let word = tag
            .trim_start_matches(['{', '%', '-', '+'])
            .trim_end_matches(['}', '%', '-', '+'])
            .trim();
        out.push_str(&rest[..start]);
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}
