//! Conversations with images and the like: as far as the engine's tokens and its names for the items are known, their
//! blocks are. From the first item on of which something is not known, the prompt goes on unknown.

use super::{Encoded, Intake, Named, Stopwatch, estimate, reason};
use crate::block::{Content, Salt};
use crate::openai;
use crate::prompt::media::Root;
use crate::prompt::{Illustrated, TokenBudget};
use crate::router::{Prompt, Reason};

impl Intake {
    /// The prompt of a conversation that shows or plays something.
    pub(super) fn read_illustrated(
        &self,
        (named, salt): (&Named, &Salt),
        request: &openai::Request,
        encoded: &mut Encoded,
        clock: &mut Stopwatch,
    ) {
        let Some(encoder) = &named.model.encoder else {
            return encoded.fail(Reason::NoTokenizer);
        };
        let root = self.agreed(named, |agreed| match &agreed.root {
            Some(root) => Some(Root::Alike(root.clone())),
            None => agreed.roots_differ.then_some(Root::Different),
        });
        let is_over = clock.deadline();
        let budget = TokenBudget::new(self.most_tokens(named), &is_over);
        let root = root.unwrap_or_default();
        let mut shown = match encoder.illustrate(request, salt.cache.as_deref(), &budget, &root) {
            Ok(shown) => shown,
            Err(error) => return encoded.fail(reason(error)),
        };
        encoded.times.push(("render", clock.lap()));
        encoded.ours = true;
        encoded.illustrated = true;
        if !shown.whole {
            let size = named.model.block_size.tokens();
            shown.tokens.truncate(shown.tokens.len() / size * size);
        }
        let Illustrated {
            tokens,
            at_least,
            whole,
            ..
        } = &shown;
        let objects = shown.objects();
        let content = Content {
            windows: named.model.windows,
            objects: &objects,
            ..Content::plain(tokens, salt)
        };
        let known = tokens.hashes_of(&content, named.model.block_size, named.model.media);
        encoded.tracked = self.tracked_content(named, &content, &known);
        encoded.prompt = match whole {
            true => Prompt::Hashed(vec![known]),
            false => {
                let tokens = (*at_least as u64)
                    .min(estimate(usize::MAX))
                    .max(known.tokens() as u64);
                Prompt::Beginning {
                    known,
                    tokens,
                    because: Reason::Multimodal,
                }
            }
        };
        if *whole {
            encoded.tokens = vec![shown.tokens.into_ids()];
        }
        encoded.times.push(("hash", clock.lap()));
    }
}
