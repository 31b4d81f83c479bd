//! The request bodies: chats, either with new content (cold) or as the next turn of a conversation
//! (warm). All are generated before the measurement.

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use warmroute_testbed::deployment::MODEL;

const WORDS: &str = include_str!("../../engine-sim/src/words.txt");
/// Bytes of one message of a long chat.
const MESSAGE: usize = 2_600;
/// Bytes that a turn adds to a long chat: a question and the previous answer.
const TURN: usize = 1_000;

/// Generates chats. The same seed generates the same chats.
pub(crate) struct ChatWriter {
    rng: StdRng,
    words: Vec<&'static str>,
    model: &'static str,
}

impl ChatWriter {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            words: WORDS.lines().collect(),
            model: MODEL,
        }
    }

    /// Sets the requested model to another one than the engines serve.
    pub(crate) fn with_model(self, model: &'static str) -> Self {
        Self { model, ..self }
    }

    /// Appends sentences of about `bytes` bytes, with some paragraph breaks, which JSON must
    /// escape.
    fn append_sentences(&mut self, text: &mut String, bytes: usize) {
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
        self.append_sentences(chat, bytes.max(8));
        chat.push_str("\"}");
    }

    /// Returns a new chat of about `bytes` bytes.
    pub(crate) fn new_chat(&mut self, bytes: usize) -> Bytes {
        GrowingChat::open(self, None, bytes).body()
    }

    /// Returns `count` new chats.
    pub(crate) fn new_chats(&mut self, bytes: usize, count: usize) -> Vec<Bytes> {
        (0..count).map(|_| self.new_chat(bytes)).collect()
    }

    /// Returns a system prompt that chats can share.
    pub(crate) fn system_prompt(&mut self, bytes: usize) -> String {
        let mut text = String::new();
        self.append_sentences(&mut text, bytes);
        text
    }
}

/// A conversation in progress.
pub(crate) struct GrowingChat {
    chat: String,
    turn_bytes: usize,
    /// Length before the first turn.
    initial_len: usize,
}

impl GrowingChat {
    /// Starts a conversation of about `bytes` bytes, with its own or a shared system prompt.
    pub(crate) fn open(writer: &mut ChatWriter, system: Option<&str>, bytes: usize) -> Self {
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
            turn_bytes: (bytes / 8).clamp(100, TURN),
            initial_len: chat.len(),
            chat,
        }
    }

    /// Appends the previous answer and the next question. A conversation beyond its intended length
    /// restarts from its beginning.
    pub(crate) fn add_turn(&mut self, writer: &mut ChatWriter) {
        if self.chat.len() > self.initial_len + self.initial_len / 4 {
            self.chat.truncate(self.initial_len);
        }
        writer.message(&mut self.chat, "assistant", self.turn_bytes / 2);
        writer.message(&mut self.chat, "user", self.turn_bytes / 2);
    }

    /// Returns the request body.
    pub(crate) fn body(&self) -> Bytes {
        format!("{}]}}", self.chat).into()
    }
}

/// Conversations that advance in rotation.
pub(crate) struct ChatRotation {
    writer: ChatWriter,
    chats: Vec<GrowingChat>,
    next: usize,
}

impl ChatRotation {
    pub(crate) fn open(
        mut writer: ChatWriter,
        system: Option<&str>,
        bytes: usize,
        count: usize,
    ) -> Self {
        let chats = (0..count)
            .map(|_| GrowingChat::open(&mut writer, system, bytes))
            .collect();
        Self {
            writer,
            chats,
            next: 0,
        }
    }

    /// Returns the first request of every conversation.
    pub(crate) fn first_bodies(&self) -> Vec<Bytes> {
        self.chats.iter().map(GrowingChat::body).collect()
    }

    /// Returns the next requests, one conversation after the other.
    pub(crate) fn next_bodies(&mut self, count: usize) -> Vec<Bytes> {
        let mut turns = Vec::with_capacity(count);
        for _ in 0..count {
            let chat = &mut self.chats[self.next];
            chat.add_turn(&mut self.writer);
            turns.push(chat.body());
            self.next = (self.next + 1) % self.chats.len();
        }
        turns
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn bodies_are_chats_of_requested_length() {
        let mut writer = ChatWriter::new(1);
        for bytes in [1_000, 4_000, 32_000, 220_000] {
            let body = writer.new_chat(bytes);
            let deviation = (body.len() as f64 / bytes as f64 - 1.0).abs();
            assert!(deviation < 0.15, "{} for {bytes}", body.len());
            let chat: Value = serde_json::from_slice(&body).unwrap();
            assert!(chat["messages"].as_array().unwrap().len() >= 2, "{chat}");
        }
        assert_ne!(writer.new_chat(1_000), writer.new_chat(1_000));
    }

    #[test]
    fn turn_begins_with_previous_messages() {
        let mut chats = ChatRotation::open(ChatWriter::new(1), Some("Be kind."), 5_000, 2);
        let before = chats.first_bodies();
        let after = chats.next_bodies(4);
        for (at, body) in after.iter().enumerate() {
            let before = &before[at % 2];
            assert!(
                body.starts_with(&before[..before.len() - 2]),
                "a turn appends to the message list"
            );
            serde_json::from_slice::<Value>(body).unwrap();
        }
    }

    #[test]
    fn chat_length_is_bounded() {
        let mut chats = ChatRotation::open(ChatWriter::new(1), None, 5_000, 1);
        let longest = chats.next_bodies(100).iter().map(Bytes::len).max().unwrap();
        assert!((6_000..8_000).contains(&longest), "{longest}");
    }
}
