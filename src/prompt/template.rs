//! Chat templates: compiled at load, where anything that could render differently from Jinja2 is refused by name, and
//! rendered with limited fuel, so that no request makes a template run for ever.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use memchr::memmem;
use minijinja::machinery::{WhitespaceConfig, parse};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::conversation::{self, Turn};
use super::detect::{self, ContentFormat};
use super::direct::Direct;
use super::files::{LoadError, Sources};
use super::inline_systems::InlineSystems;
use super::media::Rules;
use super::python::{self, DOUBT, Dict};
use super::stage::{Show, Stage};
use super::{EncodeError, Engine, Exactness, continuation, methods, sglang, support, unfinished};
use crate::openai::{Chat, JsonValue};

/// Instructions a template may spend: thousands of messages, or about a second.
const FUEL: u64 = 20_000_000;

/// Template variables that clients may not set, because they steer the rendering itself in ways that depend on the engine.
const RESERVED: [&str; 13] = [
    "chat_template",
    "tokenize",
    "conversation",
    "messages",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "sanitize_control_tokens",
    "self",
];

/// The chat templates of a model.
pub(super) struct Templates {
    named: BTreeMap<String, Template>,
    inline_systems: InlineSystems,
    special_tokens: Vec<(&'static str, String)>,
    engine: Engine,
}

impl fmt::Debug for Templates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.named.keys()).finish()
    }
}

impl Templates {
    pub(super) fn compile(
        sources: Sources,
        special_tokens: Vec<(&'static str, String)>,
        now: impl Fn() -> jiff::Zoned + Send + Sync + 'static,
    ) -> Result<Self, LoadError> {
        let now: Clock = Arc::new(now);
        let mut named = BTreeMap::new();
        for (name, source) in sources.named {
            let template =
                Template::compile(&source, &now).map_err(|problem| LoadError::Template {
                    path: sources.path.clone(),
                    name: name.clone(),
                    problem,
                })?;
            named.insert(name, template);
        }
        let inline_systems = InlineSystems::of_all(&named);
        Ok(Self {
            named,
            inline_systems,
            special_tokens,
            engine: Engine::Vllm,
        })
    }

    /// The same, rendered as this engine does.
    pub(super) fn of_engine(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }

    /// The prompt of a conversation that shows and plays nothing; or how it begins, where more follows.
    pub(super) fn render(&self, chat: &Chat) -> Result<(String, Exactness), EncodeError> {
        if !chat.unfinished {
            return self.render_as(chat, Show::Nothing);
        }
        let nobody = Rules::default();
        let show = |chat: &Chat| {
            if chat.has_media() {
                Show::As(&nobody)
            } else {
                Show::Nothing
            }
        };
        let format = match self.engine {
            Engine::Vllm => self.of(chat)?.format,
            // What it does with images is not known here.
            Engine::Sglang => ContentFormat::Text,
        };
        unfinished::beginning(chat, format, |chat| self.render_as(chat, show(chat)))
    }

    /// Whether the template of a conversation takes lists of parts.
    pub(super) fn takes_parts(&self, chat: &Chat) -> Result<bool, EncodeError> {
        Ok(self.of(chat)?.format == ContentFormat::Parts)
    }

    fn of(&self, chat: &Chat) -> Result<&Template, EncodeError> {
        let has_tools = chat.tools.is_some() || tools_of_kwargs(chat).is_some();
        let with_tools = self.named.get("tool_use").filter(|_| has_tools);
        with_tools
            .or_else(|| self.named.get("default"))
            .ok_or(EncodeError::NoTemplate)
    }

    /// The prompt of a conversation, its images and the like shown like this.
    pub(super) fn render_as(
        &self,
        chat: &Chat,
        show: Show<'_>,
    ) -> Result<(String, Exactness), EncodeError> {
        check(chat)?;
        let template = self.of(chat)?;
        if self.engine == Engine::Sglang {
            return self.render_for_sglang(template, chat);
        }
        template.check_switch(chat)?;
        let messages = self.inline_systems.placed(chat)?;
        let mut turns = conversation::turns(&messages, template.format, &mut Stage::new(show))?;
        if !template.knows_developers && turns.iter().any(|turn| turn.role == "developer") {
            turns = conversation::without_developers(turns);
        }
        template.check_thoughts(&turns)?;
        let continued = chat
            .continue_final_message
            .then(|| continuation::mark(&mut turns))
            .transpose()?;
        let (text, exact) = template.render_turns(turns, self.variables(chat)?)?;
        match continued {
            None => Ok((text, exact)),
            Some(_) if !template.reads_content => {
                Err(EncodeError::rejected("the template reads no content"))
            }
            Some(message) => Ok((continuation::cut(text, &message)?, exact)),
        }
    }

    /// What is evaluated directly, if it is, and what minijinja renders; nothing where the conversation is refused before.
    #[cfg(test)]
    pub(super) fn render_both(
        &self,
        chat: &Chat,
    ) -> Option<(Option<String>, Result<String, EncodeError>)> {
        let template = self.of(chat).ok()?;
        let turns = || {
            conversation::turns(
                &chat.messages,
                template.format,
                &mut Stage::new(Show::Nothing),
            )
            .ok()
        };
        let mut variables = self.variables(chat).ok()?;
        let direct = template.direct.render(&turns()?, &variables);
        variables.insert("messages", conversation::into_value(turns()?));
        let rendered = template.render(Dict::from_iter(variables).into_value());
        Some((direct, rendered.map(|(text, _)| text)))
    }

    fn render_for_sglang(
        &self,
        template: &Template,
        chat: &Chat,
    ) -> Result<(String, Exactness), EncodeError> {
        sglang::check(chat)?;
        if self.named.len() > 1 {
            return Err(EncodeError::uncertain(
                "SGLang takes the first of several templates",
            ));
        }
        let special = self
            .special_tokens
            .iter()
            .map(|(name, token)| ((*name).to_owned(), Value::from(token.as_str())));
        let mut variables: BTreeMap<String, Value> = special.collect();
        variables.extend(sglang::variables(chat)?);
        let turns = sglang::turns(chat, template.format_in_sglang)?;
        let variables = variables
            .iter()
            .map(|(name, value)| (name.as_str(), value.clone()))
            .collect();
        match template.render_turns(turns, variables) {
            // It tries once more with its tools in another form.
            Err(EncodeError::Render(_)) if chat.tools.is_some() => Err(EncodeError::uncertain(
                "SGLang renders anew where the template fails",
            )),
            rendered => rendered,
        }
    }

    /// Everything the template sees beside the messages, later entries over earlier ones.
    fn variables<'c>(&'c self, chat: &'c Chat) -> Result<BTreeMap<&'c str, Value>, EncodeError> {
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        variables.extend(
            self.special_tokens
                .iter()
                .map(|(name, token)| (*name, Value::from(token.as_str()))),
        );
        variables.insert("documents", Value::from(()));
        // Tools are added below. Templates print their numbers and do not compare them.
        let kwargs = chat
            .chat_template_kwargs
            .iter()
            .filter(|(name, value)| *name != "tools" && is_set(value));
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
            None => chat
                .tools
                .as_deref()
                .map(conversation::tools)
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

/// Whether an entry of chat_template_kwargs counts: vLLM treats these two values as absent.
fn is_set(value: &JsonValue) -> bool {
    !value.is_null() && value.as_str() != Some("auto")
}

/// Tools in chat_template_kwargs, which replace those of the request and reach the template as they were sent.
fn tools_of_kwargs(chat: &Chat) -> Option<&JsonValue> {
    chat.chat_template_kwargs
        .get("tools")
        .filter(|tools| is_set(tools))
}

/// What the engine refuses before it renders, and what it would do in unknown ways.
fn check(chat: &Chat) -> Result<(), EncodeError> {
    if chat.chat_template.is_some() {
        return Err(EncodeError::RequestTemplate);
    }
    if chat.forwarded_tokens {
        return Err(EncodeError::uncertain(
            "another engine forwards the prompt's tokens",
        ));
    }
    if chat.continue_final_message && chat.add_generation_prompt {
        return Err(EncodeError::rejected(
            "continue_final_message together with add_generation_prompt",
        ));
    }
    match chat
        .chat_template_kwargs
        .keys()
        .find(|name| RESERVED.contains(&name.as_str()))
    {
        Some(name) => Err(EncodeError::uncertain(format!(
            "`{name}` in chat_template_kwargs"
        ))),
        None => Ok(()),
    }
}

/// What time it is, and where.
pub(super) type Clock = Arc<dyn Fn() -> jiff::Zoned + Send + Sync>;

/// One compiled template.
pub(super) struct Template {
    env: Environment<'static>,
    format: ContentFormat,
    format_in_sglang: Option<ContentFormat>,
    knows_developers: bool,
    reads_content: bool,
    /// Whether it asks how much is to be thought.
    switches_thoughts: bool,
    /// Versions of transformers differ in the names under which thoughts reach a template.
    reads_thinking: bool,
    reads_clock: bool,
    pub(super) inline_systems: InlineSystems,
    direct: Direct,
}

pub(super) const NAME: &str = "chat_template";

impl Template {
    fn compile(written: &str, now: &Clock) -> Result<Self, String> {
        let source = without_generation_tags(written);
        let whitespace = WhitespaceConfig {
            keep_trailing_newline: false,
            lstrip_blocks: true,
            trim_blocks: true,
        };
        let tree = parse(&source, NAME, Default::default(), whitespace)
            .map_err(|error| error.to_string())?;
        support::check(&tree)?;
        let format = detect::content_format(&tree);
        let format_in_sglang = sglang::content_format(&tree, &source);
        let mut env = environment(now);
        env.add_template_owned(NAME, source.clone())
            .map_err(|error| error.to_string())?;
        let holds = |words: &[&str]| words.iter().any(|word| source.contains(word));
        Ok(Self {
            format,
            format_in_sglang,
            switches_thoughts: holds(&["reasoning_effort", "enable_thinking"]),
            knows_developers: holds(&["\"developer\"", "'developer'"]),
            reads_content: holds(&["content"]),
            reads_thinking: holds(&[".thinking", "'thinking'", "\"thinking\""]),
            reads_clock: holds(&["strftime_now"]),
            // Plain Jinja2 does not know the tags.
            inline_systems: if source == written {
                InlineSystems::of(&env)
            } else {
                InlineSystems::Merged
            },
            direct: Direct::compile(&tree, now),
            env,
        })
    }

    fn check_switch(&self, chat: &Chat) -> Result<(), EncodeError> {
        if self.switches_thoughts && chat.thinking_off {
            return Err(EncodeError::uncertain(
                "which effort stands for no thoughts, which engines try out",
            ));
        }
        Ok(())
    }

    fn check_thoughts(&self, turns: &[Turn<'_>]) -> Result<(), EncodeError> {
        if self.reads_thinking && turns.iter().any(Turn::has_thoughts) {
            return Err(EncodeError::uncertain("the template reads `thinking`"));
        }
        Ok(())
    }

    fn render_turns(
        &self,
        turns: Vec<Turn<'_>>,
        mut variables: BTreeMap<&str, Value>,
    ) -> Result<(String, Exactness), EncodeError> {
        if let Some(text) = self.direct.render(&turns, &variables) {
            return self.certain(text);
        }
        variables.insert("messages", conversation::into_value(turns));
        self.render(Dict::from_iter(variables).into_value())
    }

    fn exactness(&self) -> Exactness {
        if self.reads_clock {
            Exactness::Clock
        } else {
            Exactness::Exact
        }
    }

    fn render(&self, variables: Value) -> Result<(String, Exactness), EncodeError> {
        self.certain(render_in(&self.env, variables)?)
    }

    /// A rendered text, unless it contains an unknown value.
    fn certain(&self, text: String) -> Result<(String, Exactness), EncodeError> {
        if memmem::find(text.as_bytes(), DOUBT.as_bytes()).is_some() {
            return Err(EncodeError::uncertain(
                "a value that only the engine prints exactly",
            ));
        }
        Ok((text, self.exactness()))
    }
}

fn render_in(env: &Environment<'_>, variables: Value) -> Result<String, EncodeError> {
    let render = || {
        env.get_template(NAME)
            .and_then(|template| template.render(variables))
    };
    // minijinja 2.24 panics on some slices (`''[::-1]`), and the text that is sliced comes from the client.
    catch_unwind(AssertUnwindSafe(render))
        .map_err(|_| EncodeError::Render("the template engine panicked".to_owned()))?
        .map_err(|error| EncodeError::Render(error.to_string()))
}

/// Jinja2 as transformers sets it up.
fn environment(now: &Clock) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    methods::install(&mut env);
    env.add_function("raise_exception", |message: &str| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
    });
    let now = Arc::clone(now);
    env.add_function("strftime_now", move |format: &str| strftime(&now, format));
    env
}

/// The time in words.
pub(super) fn strftime(now: &Clock, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// The tags `generation` and `endgeneration` mark text for training and render to nothing themselves.
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
