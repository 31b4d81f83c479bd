//! Request bodies with the documentation and the source code of this repository, and with tool calls
//! whose arguments contain source code. The texts have about as many JSON escapes as real prompts.
//! Conversations share a system prompt, and every request of a conversation repeats its history and
//! ends with new text.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use warmroute_testbed::repository;

/// Maximum length of a message in bytes of JSON.
const MAX_MESSAGE_BYTES: usize = 2_600;
/// Share of the system prompt, which all conversations have in common.
const SYSTEM_SHARE: f64 = 0.3;
/// Maximum bytes of new text in [`NewText::Message`].
const NEW_MESSAGE_BYTES: usize = 1_000;
/// Bytes of new text per word that no other request contains.
const BYTES_PER_NEW_WORD: usize = 200;
/// Maximum number of conversations that advance in turn.
const MAX_CONVERSATIONS: usize = 32;
/// Maximum bytes of all conversations, unless two of them exceed it. The prompt cache holds them.
const MAX_TOTAL_BYTES: usize = 4_000_000;

/// New text of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewText {
    /// The whole conversation.
    Conversation,
    /// A tenth of the body.
    Tenth,
    /// One message of about 1 KB, or of a tenth of a smaller body.
    Message,
}

impl NewText {
    fn byte_count(self, body_bytes: usize) -> usize {
        match self {
            Self::Conversation => body_bytes,
            Self::Tenth => body_bytes / 10,
            Self::Message => (body_bytes / 10).min(NEW_MESSAGE_BYTES),
        }
    }
}

/// Lines of the documentation and the source code.
struct RepositoryLines(Vec<String>);

impl RepositoryLines {
    fn read() -> anyhow::Result<Self> {
        let mut lines = Vec::new();
        for directory in ["docs", "crates"] {
            append_lines(&repository().join(directory), &mut lines)?;
        }
        ensure!(
            lines.len() > 10_000,
            "the repository has only {} lines of text",
            lines.len()
        );
        Ok(Self(lines))
    }
}

/// Appends the lines of all files in a directory, in the order of their names.
fn append_lines(directory: &Path, lines: &mut Vec<String>) -> anyhow::Result<()> {
    let entries = fs::read_dir(directory)
        .with_context(|| format!("cannot read {}", directory.display()))?
        .collect::<Result<Vec<_>, _>>()?;
    let mut paths: Vec<_> = entries.iter().map(fs::DirEntry::path).collect();
    paths.sort();
    for path in paths {
        let is_text = path
            .extension()
            .is_some_and(|extension| extension == "md" || extension == "rs");
        if path.is_dir() {
            append_lines(&path, lines)?;
        } else if is_text {
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            lines.extend(text.lines().map(str::to_owned));
        }
    }
    Ok(())
}

/// Generates conversations from the texts of the repository. The same seed generates the same ones.
pub struct TextRotation {
    rng: StdRng,
    lines: RepositoryLines,
    /// First part of each conversation's bodies: the system prompt and the history.
    histories: Vec<String>,
    new_bytes: usize,
    next: usize,
}

impl TextRotation {
    /// Opens conversations whose bodies have about `bytes` bytes.
    pub fn open(model: &str, bytes: usize, new_text: NewText, seed: u64) -> anyhow::Result<Self> {
        let mut rotation = Self {
            rng: StdRng::seed_from_u64(seed),
            lines: RepositoryLines::read()?,
            histories: Vec::new(),
            new_bytes: new_text.byte_count(bytes),
            next: 0,
        };
        let mut shared =
            format!("{{\"model\":\"{model}\",\"stream\":true,\"max_tokens\":1,\"messages\":[");
        let old_bytes = bytes - rotation.new_bytes;
        if old_bytes > 0 {
            let system_bytes = (bytes as f64 * SYSTEM_SHARE) as usize;
            rotation.append_message(&mut shared, "system", system_bytes, false);
        }
        let count = (MAX_TOTAL_BYTES / bytes).clamp(2, MAX_CONVERSATIONS);
        for _ in 0..count {
            let mut history = shared.clone();
            let history_bytes = old_bytes.saturating_sub(history.len());
            rotation.append_messages(&mut history, history_bytes, false);
            rotation.histories.push(history);
        }
        Ok(rotation)
    }

    /// Returns the first request of every conversation.
    pub fn first_bodies(&mut self) -> Vec<Bytes> {
        self.next_bodies(self.histories.len())
    }

    /// Returns the next requests, one conversation after the other.
    pub fn next_bodies(&mut self, count: usize) -> Vec<Bytes> {
        let mut bodies = Vec::with_capacity(count);
        for _ in 0..count {
            let mut body = self.histories[self.next].clone();
            self.next = (self.next + 1) % self.histories.len();
            self.append_messages(&mut body, self.new_bytes, true);
            body.push_str("]}");
            bodies.push(body.into());
        }
        bodies
    }

    /// Appends about `bytes` bytes of messages: user and assistant texts, and tool calls with their
    /// results.
    fn append_messages(&mut self, chat: &mut String, bytes: usize, is_new: bool) {
        let until = chat.len() + bytes;
        let mut roles = ["user", "assistant", "user", "tool"].into_iter().cycle();
        while let Some(left) = until.checked_sub(chat.len()).filter(|left| *left > 60) {
            let role = roles.next().unwrap_or("user");
            let length = left.min(MAX_MESSAGE_BYTES);
            if role == "tool" {
                self.append_tool_call(chat, length / 2);
                self.append_message(chat, role, length / 2, is_new);
            } else {
                self.append_message(chat, role, length, is_new);
            }
        }
    }

    fn append_message(&mut self, chat: &mut String, role: &str, bytes: usize, is_new: bool) {
        let until = chat.len() + bytes;
        let separator = if chat.ends_with('[') { "" } else { "," };
        let call_id = if role == "tool" {
            "\"tool_call_id\":\"call-1\","
        } else {
            ""
        };
        chat.push_str(&format!(
            "{separator}{{\"role\":\"{role}\",{call_id}\"content\":\""
        ));
        let mut line = self.rng.random_range(0..self.lines.0.len());
        let mut next_word = chat.len();
        while chat.len() + 2 < until {
            if is_new && chat.len() >= next_word {
                next_word = chat.len() + BYTES_PER_NEW_WORD;
                chat.push_str(&format!("{:x} ", self.rng.random::<u64>()));
            }
            let quoted = Value::from(self.lines.0[line].as_str()).to_string();
            chat.push_str(&quoted[1..quoted.len() - 1]);
            chat.push_str("\\n");
            line = (line + 1) % self.lines.0.len();
        }
        chat.push_str("\"}");
    }

    /// Appends an assistant message with one tool call. Its arguments are a JSON text in a string.
    fn append_tool_call(&mut self, chat: &mut String, bytes: usize) {
        let mut content = String::new();
        let mut line = self.rng.random_range(0..self.lines.0.len());
        while content.len() < bytes {
            content.push_str(&self.lines.0[line]);
            content.push('\n');
            line = (line + 1) % self.lines.0.len();
        }
        let arguments = json!({"path": "src/main.rs", "content": content}).to_string();
        let call = json!({
            "role": "assistant",
            "content": null,
            "tool_calls": [{
                "id": "call-1",
                "type": "function",
                "function": {"name": "write_file", "arguments": arguments},
            }],
        });
        chat.push_str(&format!(",{call}"));
    }
}

/// Returns the texts of all messages of a body, without tool calls.
pub fn message_texts(body: &[u8]) -> anyhow::Result<Vec<String>> {
    let chat: Value = serde_json::from_slice(body).context("the body is not JSON")?;
    let messages = chat["messages"]
        .as_array()
        .context("the body has no messages")?;
    let texts = messages
        .iter()
        .filter_map(|message| message["content"].as_str());
    Ok(texts.map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_requested_length_and_history() {
        for (bytes, new_text) in [
            (1_000, NewText::Tenth),
            (32_000, NewText::Message),
            (220_000, NewText::Tenth),
        ] {
            let mut texts = TextRotation::open("m", bytes, new_text, 1).unwrap();
            let first = texts.first_bodies();
            let next = texts.next_bodies(first.len());
            let deviation = (first[0].len() as f64 / bytes as f64 - 1.0).abs();
            assert!(deviation < 0.3, "{} for {bytes}", first[0].len());
            assert_ne!(first[0], next[0]);
            let history = texts.histories[0].len();
            assert_eq!(first[0][..history], next[0][..history]);
            assert_ne!(first[0][..history], first[1][..history]);
            let chat: Value = serde_json::from_slice(&next[1]).unwrap();
            let messages = chat["messages"].as_array().unwrap();
            assert!(messages.len() >= 2, "{chat}");
            let texts = message_texts(&next[1]).unwrap();
            assert!(texts.len() >= 2 && texts.len() <= messages.len());
        }
    }

    #[test]
    fn new_conversations_have_distinct_content() {
        let mut texts = TextRotation::open("m", 32_000, NewText::Conversation, 1).unwrap();
        let bodies = texts.next_bodies(2);
        let text = |body: &Bytes| String::from_utf8(body.to_vec()).unwrap();
        let first = text(&bodies[0]);
        let (head, content) = first.split_once("\"content\":").unwrap();
        assert!(text(&bodies[1]).starts_with(head));
        assert!(!text(&bodies[1]).contains(&content[..100]));
    }
}
