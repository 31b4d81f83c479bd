//! The requests: chats as users have them, in bytes that nobody has sent before (cold), or that go on where they were (warm).
//! All of it is made before anything is measured.

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use crate::support::stack::MODEL;

const WORDS: &str = include_str!("../engine_sim/engine/words.txt");
/// Bytes of one message of a long chat.
const MESSAGE: usize = 2_600;
/// Bytes that a turn of a long chat adds: a question and the answer before it.
const TURN: usize = 1_000;

/// Makes chats; the same seed makes the same ones.
pub(crate) struct Writer {
    rng: StdRng,
    words: Vec<&'static str>,
    model: &'static str,
}

impl Writer {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            words: WORDS.lines().collect(),
            model: MODEL,
        }
    }

    /// For another model than the engines'.
    pub(crate) fn asking_for(self, model: &'static str) -> Self {
        Self { model, ..self }
    }

    /// Adds sentences of about so many bytes; a new paragraph, which JSON has to escape, now and then.
    fn say(&mut self, text: &mut String, bytes: usize) {
        let until = text.len() + bytes;
        let mut sentence = 0;
        while text.len() < until {
            let word = self.words.choose(&mut self.rng).copied().unwrap_or("word");
            if sentence == 0 {
                sentence = self.rng.random_range(5..15);
                text.push_str(&word[..1].to_uppercase());
                text.push_str(&word[1..]);
            } else {
                text.push_str(word);
            }
            sentence -= 1;
            text.push_str(match sentence {
                0 if self.rng.random_range(0..6) == 0 => ".\\n\\n",
                0 => ". ",
                _ => " ",
            });
        }
    }

    fn message(&mut self, chat: &mut String, role: &str, bytes: usize) {
        let separator = if chat.ends_with('[') { "" } else { "," };
        chat.push_str(&format!("{separator}{{\"role\":\"{role}\",\"content\":\""));
        self.say(chat, bytes.max(8));
        chat.push_str("\"}");
    }

    /// A chat of about so many bytes that nobody has sent before.
    pub(crate) fn cold(&mut self, bytes: usize) -> Bytes {
        Session::open(self, None, bytes).body()
    }

    /// So many of them.
    pub(crate) fn colds(&mut self, bytes: usize, count: usize) -> Vec<Bytes> {
        (0..count).map(|_| self.cold(bytes)).collect()
    }

    /// A system prompt that many chats may have in common.
    pub(crate) fn system(&mut self, bytes: usize) -> String {
        let mut text = String::new();
        self.say(&mut text, bytes);
        text
    }
}

/// A chat that goes on.
pub(crate) struct Session {
    chat: String,
    turn: usize,
    /// How long it is before its first turn.
    began: usize,
}

impl Session {
    /// One that has about so many bytes behind it, with a system prompt of its own or a common one.
    pub(crate) fn open(writer: &mut Writer, system: Option<&str>, bytes: usize) -> Self {
        let model = writer.model;
        let mut chat =
            format!("{{\"model\":\"{model}\",\"stream\":true,\"max_tokens\":1,\"messages\":[");
        let bytes = bytes.saturating_sub(chat.len() + 60);
        match system {
            Some(system) => {
                chat.push_str(&format!("{{\"role\":\"system\",\"content\":\"{system}\"}}"))
            }
            None => writer.message(&mut chat, "system", bytes.min(MESSAGE) / 2),
        }
        let mut roles = ["user", "assistant"].into_iter().cycle();
        while let Some(left) = bytes.checked_sub(chat.len()).filter(|left| *left > 100) {
            let role = roles.next().unwrap_or("user");
            writer.message(&mut chat, role, left.min(MESSAGE) - 40);
        }
        Self {
            turn: (bytes / 8).clamp(100, TURN),
            began: chat.len(),
            chat,
        }
    }

    /// The next thing that its user says, and the answer before it. A chat that has become longer than it was meant to be is
    /// taken up at its beginning again.
    pub(crate) fn go_on(&mut self, writer: &mut Writer) {
        if self.chat.len() > self.began + self.began / 4 {
            self.chat.truncate(self.began);
        }
        writer.message(&mut self.chat, "assistant", self.turn / 2);
        writer.message(&mut self.chat, "user", self.turn / 2);
    }

    /// As it is sent.
    pub(crate) fn body(&self) -> Bytes {
        format!("{}]}}", self.chat).into()
    }
}

/// Many sessions that take turns.
pub(crate) struct Sessions {
    writer: Writer,
    sessions: Vec<Session>,
    next: usize,
}

impl Sessions {
    pub(crate) fn open(
        mut writer: Writer,
        system: Option<&str>,
        (bytes, count): (usize, usize),
    ) -> Self {
        let sessions = (0..count)
            .map(|_| Session::open(&mut writer, system, bytes))
            .collect();
        Self {
            writer,
            sessions,
            next: 0,
        }
    }

    /// As they are, for the first time that each is sent.
    pub(crate) fn first(&self) -> Vec<Bytes> {
        self.sessions.iter().map(Session::body).collect()
    }

    /// Their next turns, one session after the other.
    pub(crate) fn turns(&mut self, count: usize) -> Vec<Bytes> {
        let mut turns = Vec::with_capacity(count);
        for _ in 0..count {
            let session = &mut self.sessions[self.next];
            session.go_on(&mut self.writer);
            turns.push(session.body());
            self.next = (self.next + 1) % self.sessions.len();
        }
        turns
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn bodies_have_about_the_length_that_was_asked_for_and_are_chats() {
        let mut writer = Writer::new(1);
        for bytes in [1_000, 4_000, 32_000, 220_000] {
            let body = writer.cold(bytes);
            let off = (body.len() as f64 / bytes as f64 - 1.0).abs();
            assert!(off < 0.15, "{} for {bytes}", body.len());
            let chat: Value = serde_json::from_slice(&body).unwrap();
            assert!(chat["messages"].as_array().unwrap().len() >= 2, "{chat}");
        }
        assert_ne!(writer.cold(1_000), writer.cold(1_000));
    }

    #[test]
    fn a_turn_begins_with_all_that_was_said_before() {
        let mut sessions = Sessions::open(Writer::new(1), Some("Be kind."), (5_000, 2));
        let before = sessions.first();
        let after = sessions.turns(4);
        for (at, body) in after.iter().enumerate() {
            let before = &before[at % 2];
            assert!(
                body.starts_with(&before[..before.len() - 2]),
                "the end of the list is where it goes on"
            );
            serde_json::from_slice::<Value>(body).unwrap();
        }
    }

    #[test]
    fn a_chat_does_not_grow_without_end() {
        let mut sessions = Sessions::open(Writer::new(1), None, (5_000, 1));
        let longest = sessions.turns(100).iter().map(Bytes::len).max().unwrap();
        assert!((6_000..8_000).contains(&longest), "{longest}");
    }
}
