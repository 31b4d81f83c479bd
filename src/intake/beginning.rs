//! What a body says of its prompt when only its beginning was shown: the prompt begins with the blocks of what is there.
//! The last tokens before the cut are left out, because what follows may join them, and so is every block that is not
//! full. Where it cannot be said how the prompt begins, it goes by load.

use tracing::debug;

use super::{Encoded, Intake, Named, Stopwatch, TokenizedPrompts, Told, TruncatedBody, estimate};
use crate::block::Salt;
use crate::openai::cut::{Cut, Mended, Step, mend};
use crate::openai::{self, Api, Chat, Content, Meaning, Message, Shape};
use crate::prompt::Tokens;
use crate::router::{Prompt, Reason};

/// Tokens before the cut that what follows may change.
const UNSETTLED: usize = 8;

/// How often something open is dropped until the parser is content.
const TRIES: usize = 4;

impl Intake {
    /// Reads the beginning of a body.
    pub(super) fn read_beginning(
        &self,
        api: Api,
        told: &Told,
        shown: &[u8],
        cut: TruncatedBody,
    ) -> Encoded {
        let TruncatedBody { length, because } = cut;
        let whole = usize::try_from(length.unwrap_or(0))
            .unwrap_or(usize::MAX)
            .max(shown.len());
        let mut encoded = Encoded::without(api, whole, because);
        let asked = openai::model_quickly(shown);
        if asked.is_some() {
            encoded.asks(asked, &self.parts.models);
        }
        if let (Some(boundary), false) = (told.boundary.as_deref(), api.is_text()) {
            // A form names its model before its files, if its author is kind.
            let form = openai::parse_body(api, Some(boundary), shown);
            encoded.asks(form.ok().and_then(|form| form.model), &self.parts.models);
            return encoded;
        }
        let Some(mended) = mend(shown).and_then(without_begun_name) else {
            return encoded;
        };
        if mended.cut == Cut::Nowhere {
            let encoded = self.read(api, told, shown);
            return if because == Reason::BodyTooLarge {
                encoded.too_large()
            } else {
                encoded
            };
        }
        encoded.session = self.session_in(told, &mended.json);
        if api.shape() != Shape::Prompt {
            return encoded;
        }
        let Some((mended, request)) = readable(api, told, mended) else {
            return encoded;
        };
        let Some(mut request) = settled(request, &mended.cut) else {
            return encoded;
        };
        let Some(named) = self.parts.models.find(request.model.as_deref()) else {
            encoded.fail(Reason::UnknownModel);
            return encoded;
        };
        let mut clock = Stopwatch::start(told.until);
        let cache = encoded.salt(told, &mut request, self.parts.clients.trusted);
        let salt = Salt {
            lora: named.adapter.clone(),
            cache,
        };
        let tokens = self.tokens((&named, &salt), &request, &mut encoded, &mut clock);
        let Ok(TokenizedPrompts {
            mut prompts,
            stopped,
        }) = tokens
        else {
            return encoded;
        };
        let Some(mut tokens) = prompts.pop() else {
            return encoded;
        };
        if let Some(stopped) = stopped {
            // A limit on bodies is the operator's, and its reason is kept.
            encoded.fail(if because == Reason::BodyTooLarge {
                because
            } else {
                stopped
            });
            // The rest of the body may change the last tokens, also where the limit cuts the prompt.
            tokens.truncate(tokens.len().saturating_sub(UNSETTLED));
            self.begin_with(&named, &salt, tokens, &mut encoded);
            return encoded;
        }
        let guessed = tokens.len() as f64 * whole as f64 / shown.len().max(1) as f64;
        let size = named.model.block_size.tokens();
        tokens.truncate(tokens.len().saturating_sub(UNSETTLED) / size * size);
        if tokens.is_empty() {
            return encoded;
        }
        let known = named.resumed_hashes(&tokens, &salt);
        let prompts = [tokens.into_ids()];
        encoded.tracked = self.tracked(&named, &prompts, std::slice::from_ref(&known), &salt);
        let tokens = (guessed as u64).min(estimate(usize::MAX).max(known.tokens() as u64));
        encoded.prompt = Prompt::Beginning {
            known,
            tokens,
            because,
        };
        encoded
    }

    /// Sets the first tokens of an estimated prompt. The estimate and its reason do not change.
    pub(super) fn begin_with(
        &self,
        named: &Named,
        salt: &Salt,
        mut tokens: Tokens,
        encoded: &mut Encoded,
    ) {
        let Some(because) = encoded.prompt.because() else {
            return;
        };
        let size = named.model.block_size.tokens();
        tokens.truncate(tokens.len() / size * size);
        if tokens.is_empty() {
            return;
        }
        let known = named.resumed_hashes(&tokens, salt);
        let prompts = [tokens.into_ids()];
        encoded.tracked = self.tracked(named, &prompts, std::slice::from_ref(&known), salt);
        let tokens = encoded.prompt.tokens().max(known.tokens() as u64);
        encoded.prompt = Prompt::Beginning {
            known,
            tokens,
            because,
        };
    }
}

/// The request of the longest beginning that the parser takes.
fn readable(api: Api, told: &Told, mended: Mended) -> Option<(Mended, openai::Request)> {
    let mut mended = mended;
    for _ in 0..TRIES {
        match openai::parse_body(api, told.boundary.as_deref(), &mended.json) {
            Ok(request) => return Some((mended, request)),
            Err(error) => debug!(%error, "the beginning of a body is not readable as it is"),
        }
        mended = mended.shorter()?;
    }
    None
}

/// The request whose prompt is the beginning of the whole one's; `None` where that is not so. What stands at the beginning of
/// prompts and may come only after the cut (tools, `system`, developers), what changes all of it (arguments of the template,
/// effort, documents) and what sets it apart (a salt) is taken for absent where nothing of what was shown lets one expect
/// it, because most requests have none; so this is no evidence of the engine's tokens.
fn settled(mut request: openai::Request, cut: &Cut) -> Option<openai::Request> {
    let path = match cut {
        Cut::Nowhere => return Some(request),
        Cut::Text(path) | Cut::Between(path) => path,
    };
    let in_prompt = match path.first() {
        Some(first) => is_key(
            first,
            &[
                "messages",
                "prompt",
                "input",
                "text",
                "input_ids",
                "token_ids",
            ],
        ),
        // Behind the prompt; or before it, and then there is none.
        _ => path.is_empty(),
    };
    match &mut request.prompt {
        _ if !in_prompt => return None,
        openai::Prompt::Chat(chat) => {
            begun(chat, matches!(cut, Cut::Text(path) if is_text(path)))?;
        }
        openai::Prompt::Texts(texts) if texts.len() == 1 => {}
        openai::Prompt::Tokens(tokens) if tokens.len() == 1 => {}
        _ => return None,
    }
    // What is cut off at the front is only known at the end.
    request
        .tokenization
        .truncate_prompt_tokens
        .is_none()
        .then_some(request)
}

/// Whether this is the text of a message, and not the argument of a call that may have any name.
fn is_text(path: &[Step]) -> bool {
    let argument = |step: &Step| is_key(step, &["input", "arguments", "tool_calls"]);
    path.last()
        .is_some_and(|step| is_key(step, &["content", "text"]))
        && !path.iter().skip(1).any(argument)
}

/// Without a text that says who speaks, or of what: the beginning of such a one says something else.
fn without_begun_name(mended: Mended) -> Option<Mended> {
    const NAMES: [&str; 6] = [
        "role",
        "name",
        "id",
        "tool_call_id",
        "tool_use_id",
        "call_id",
    ];
    let begun = match &mended.cut {
        Cut::Text(path) => path.len() > 1 && path.last().is_some_and(|step| is_key(step, &NAMES)),
        _ => false,
    };
    if begun {
        mended.shorter()
    } else {
        Some(mended)
    }
}

fn is_key(step: &Step, keys: &[&str]) -> bool {
    matches!(step, Step::Key(key) if keys.contains(&key.as_str()))
}

/// Makes of a conversation the beginning of a longer one.
fn begun(chat: &mut Chat, open_text: bool) -> Option<()> {
    let calls = |message: &Message| message.role == "tool" || message.tool_calls.is_some();
    if chat.tools.is_none() && chat.messages.iter().any(calls) {
        return None;
    }
    // Other APIs have a field for it, and nearly all requests have it.
    if chat.put_together
        && chat
            .messages
            .first()
            .is_none_or(|first| first.role != "system")
    {
        return None;
    }
    chat.unfinished = true;
    chat.add_generation_prompt = false;
    chat.continue_final_message = open_text;
    // The cut may be in the midst of any item, and then it is another: what comes before its message is known.
    let shows = |message: &Message| match &message.content {
        Some(Content::Parts(parts)) => parts
            .iter()
            .any(|part| !matches!(part.meaning(), Meaning::Text(_) | Meaning::Nothing)),
        _ => false,
    };
    if let Some(first) = chat.messages.iter().position(shows) {
        chat.messages.truncate(first);
        chat.continue_final_message = false;
    }
    (!chat.messages.is_empty()).then_some(())
}
