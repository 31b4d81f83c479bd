//! Fast reader for the messages of a conversation. Most messages have only a role, a text and
//! perhaps the id of a tool call. These texts are nearly the whole body. A vectorized search finds
//! their escapes. All other messages, and the rest of the body, are left to `serde_json`.
//!
//! The reader accepts only what `serde_json` accepts, with the same result. For all other bodies it
//! returns `None`, so they have the errors of `serde_json`.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use memchr::memmem;
use serde::Deserialize;

use super::chat::ChatMessage;
use super::json_scan::{self, MAX_JSON_VALUES};
use super::message_cache::{BodyMessages, CHUNK_BYTES, MessageCache};
use super::message_text::{end_of_valid_string, unescape};
use super::parsed_message::{ParsedMessage, PlainMessage};

/// Minimum length of a body. For shorter ones, `serde_json` alone is fast enough.
const MIN_BYTES: usize = 2 << 10;

/// Minimum length of a body whose messages are cached. Shorter ones rarely fill a chunk.
const MIN_CACHED_BYTES: usize = 2 * CHUNK_BYTES;

/// End of the key of a cache salt. Inside a text, the quote would be escaped.
const SALT_KEY_END: &[u8] = b"cache_salt\"";

/// The messages of a body, and the rest of the body with an empty list in their place.
pub(super) struct PlainMessages {
    pub(super) messages: Vec<Arc<ChatMessage>>,
    pub(super) rest: String,
}

/// A message at the same depth as in a body, so that the limit of nesting is the same.
#[derive(Deserialize)]
struct NestedMessage {
    messages: [ChatMessage; 1],
}

/// Reads the messages of a body.
pub(super) fn read(text: &str) -> Option<PlainMessages> {
    if text.len() < MIN_BYTES || has_control_characters(text.as_bytes()) {
        return None;
    }
    let start = messages_start(text.as_bytes())?;
    let mut reader = MessageReader::new(&text[start..], 0);
    reader.consume(b'[')?;
    reader.messages()?;
    let list = &text[start..];
    let text_at = |range| unescape(&list[range]).unwrap_or_default().into();
    let messages = reader.parsed.iter().map(|parsed| parsed.message(text_at));
    Some(PlainMessages {
        messages: messages.collect(),
        rest: [&text[..start], "[]", &list[reader.at..]].concat(),
    })
}

/// Reads the messages of a body, and reuses cached messages of earlier bodies. Returns them with the
/// rest of the body. A body with a cache salt does not use the cache, so that the parse time does
/// not reveal requests of other tenants.
pub(super) fn read_cached(
    body: &Bytes,
    cache: &MessageCache,
    tenant: Option<&str>,
) -> Option<(BodyMessages, String)> {
    if body.len() < MIN_CACHED_BYTES
        || !cache.is_enabled()
        || memmem::find(body, SALT_KEY_END).is_some()
    {
        return None;
    }
    let start = messages_start(body)?;
    let (head, list) = body.split_at(start);
    let cached = cache.find(list, tenant);
    let cached_end = cached.end();
    let unread = &list[cached_end..];
    let unread_values = json_scan::count_separators(head) + json_scan::count_separators(unread);
    if [head, unread].into_iter().any(has_control_characters)
        || cached.value_count() + unread_values >= MAX_JSON_VALUES
    {
        return None;
    }
    let head = std::str::from_utf8(head).ok()?;
    let unread = std::str::from_utf8(unread).ok()?;
    let mut reader = MessageReader::new(unread, cached_end);
    if cached_end == 0 {
        reader.consume(b'[')?;
        reader.messages()?;
    } else {
        reader.following_messages()?;
    }
    let MessageReader { at, parsed, .. } = reader;
    let rest = [head, "[]", &unread[at..]].concat();
    let list = body.slice(start..start + cached_end + at);
    Some((BodyMessages::new(cached, list, parsed), rest))
}

/// Returns true if the bytes contain control characters, which are errors inside strings. Bodies
/// with any of them, such as indented JSON, are left to `serde_json`.
fn has_control_characters(bytes: &[u8]) -> bool {
    bytes.chunks(4096).any(|block| {
        block
            .iter()
            .fold(false, |found, byte| found | (*byte < 0x20))
    })
}

/// Returns the position of the list of messages in the outermost object.
fn messages_start(bytes: &[u8]) -> Option<usize> {
    let mut at = json_scan::skip_space(bytes, 0);
    if bytes.get(at) != Some(&b'{') {
        return None;
    }
    loop {
        at = json_scan::skip_space(bytes, at + 1);
        if bytes.get(at) != Some(&b'"') {
            return None;
        }
        let key_end = json_scan::end_of_text(bytes, at)?;
        let is_messages = &bytes[at..key_end] == b"\"messages\"";
        at = json_scan::skip_space(bytes, key_end);
        if bytes.get(at) != Some(&b':') {
            return None;
        }
        at = json_scan::skip_space(bytes, at + 1);
        if is_messages {
            return (bytes.get(at) == Some(&b'[')).then_some(at);
        }
        at = json_scan::skip_space(bytes, json_scan::end_of_value(bytes, at)?);
        if bytes.get(at) != Some(&b',') {
            return None;
        }
    }
}

/// Reader of a list of messages, or of its last part.
struct MessageReader<'t> {
    text: &'t str,
    at: usize,
    /// Number of bytes of the list before the text.
    offset: usize,
    parsed: Vec<ParsedMessage>,
}

impl<'t> MessageReader<'t> {
    fn new(text: &'t str, offset: usize) -> Self {
        Self {
            text,
            at: json_scan::skip_space(text.as_bytes(), 0),
            offset,
            parsed: Vec::new(),
        }
    }

    /// Consumes a byte and the white space after it, if the byte is the next one.
    fn consume(&mut self, byte: u8) -> Option<()> {
        let bytes = self.text.as_bytes();
        if bytes.get(self.at) != Some(&byte) {
            return None;
        }
        self.at = json_scan::skip_space(bytes, self.at + 1);
        Some(())
    }

    /// Reads one or more messages and the end of the list.
    fn messages(&mut self) -> Option<()> {
        loop {
            let start = self.at;
            let message = match self.plain_message() {
                Some(message) => message,
                None => self.other_message(start)?,
            };
            self.parsed.push(message);
            if self.consume(b',').is_none() {
                return self.consume_list_end();
            }
        }
    }

    /// Reads a comma and further messages, if any, and the end of the list.
    fn following_messages(&mut self) -> Option<()> {
        match self.consume(b',') {
            Some(()) => self.messages(),
            None => self.consume_list_end(),
        }
    }

    /// Consumes the end of the list. White space after it belongs to the rest of the body.
    fn consume_list_end(&mut self) -> Option<()> {
        (self.text.as_bytes().get(self.at) == Some(&b']')).then(|| self.at += 1)
    }

    /// Reads a message of any form, and the white space after it.
    fn other_message(&mut self, start: usize) -> Option<ParsedMessage> {
        let bytes = self.text.as_bytes();
        let end = json_scan::end_of_value(bytes, start)?;
        self.at = json_scan::skip_space(bytes, end);
        let text = self.text.get(start..end)?;
        let nested = [r#"{"messages":["#, text, "]}"].concat();
        let nested: NestedMessage = serde_json::from_str(&nested).ok()?;
        let [message] = nested.messages;
        let value_count = json_scan::count_values(text.as_bytes());
        let end = self.offset + end;
        Some(ParsedMessage::other(message, end, text.len(), value_count))
    }

    /// Reads a message that consists of certain strings, and the white space after it.
    fn plain_message(&mut self) -> Option<ParsedMessage> {
        let (text, start) = (self.text, self.at);
        let [mut role, mut content, mut tool_call_id] = [None, None, None];
        self.consume(b'{')?;
        loop {
            let field = match text.get(self.string()?)? {
                r#""role""# => &mut role,
                r#""content""# => &mut content,
                r#""tool_call_id""# => &mut tool_call_id,
                _ => return None,
            };
            // `serde_json` rejects repeated fields.
            if field.is_some() {
                return None;
            }
            self.consume(b':')?;
            *field = Some(self.string()?);
            if self.consume(b',').is_none() {
                break;
            }
        }
        let end = self.at + 1;
        self.consume(b'}')?;
        let unescaped = |range: Range<usize>| unescape(text.get(range)?);
        let mut message = PlainMessage {
            role: unescaped(role?)?.into(),
            content,
            tool_call_id: tool_call_id.and_then(unescaped).map(Into::into),
        };
        let length = end - start;
        let end = self.offset + end;
        // Templates read the system message again in each turn, and conversations share it.
        if &*message.role == "system" {
            let text_at = |range| unescaped(range).unwrap_or_default().into();
            let message = message.to_message(text_at);
            return Some(ParsedMessage::other(message, end, length, 0));
        }
        let shifted = |range: Range<usize>| self.offset + range.start..self.offset + range.end;
        message.content = message.content.map(shifted);
        Some(ParsedMessage::plain(message, end))
    }

    /// Reads a string and the white space after it. Returns its range with the quotes.
    fn string(&mut self) -> Option<Range<usize>> {
        let start = self.at;
        let end = end_of_valid_string(self.text.as_bytes(), start)?;
        self.at = json_scan::skip_space(self.text.as_bytes(), end);
        Some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warmroute_property_tests::property_config;

    use super::super::chat;
    use super::*;

    /// Pieces of strings, valid and invalid.
    const PIECES: [&str; 22] = [
        "a",
        "text ",
        "é",
        "漢",
        "😀",
        r"\n",
        r"\t",
        r"\r",
        r"\b",
        r"\f",
        r"\/",
        r"\\",
        r#"\""#,
        r"\u00e9",
        r"\ud83d\ude00",
        r"\ud83d",
        r"\x",
        r"\u12",
        "\t",
        "\n",
        "\u{7f}",
        "{[,]}:",
    ];

    /// Messages of all forms, valid and invalid.
    const MESSAGES: [&str; 19] = [
        r#"{"role":"user"}"#,
        r#"{"content":"x"}"#,
        r#"{"role":"user","content":null}"#,
        r#"{"role":"user","role":"user","content":"x"}"#,
        r#"{"role":"user","content":"x","content":"y"}"#,
        r#"{"role":"user","content":"x","other":{"a":["}",1.5e3]}}"#,
        r#"{"role":"user","content":[{"type":"text","text":"x"}]}"#,
        r#"{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"1","content":"x"}"#,
        r#"{"tool_call_id":"\u00e9","role":"tool"}"#,
        r#"{"role":1,"content":"x"}"#,
        r#"{"role":"user","content":"x",}"#,
        r#"{"r\u006fle":"user","content":"x"}"#,
        r#"["user","x"]"#,
        r#"["user","x",null,null,null,null,null,null,null]"#,
        "{}",
        "1",
        "",
        r#"{"role":"user","content":"x""#,
    ];

    const FIELDS: [&str; 12] = [
        r#""model":"m""#,
        r#""stream":true"#,
        r#""temperature":0.5"#,
        r#""tools":[{"type":"function","function":{"name":"f","parameters":{}}}]"#,
        r#""messages":[]"#,
        r#""messages":[{"role":"user","content":"y"}]"#,
        r#""m\u0065ssages":[{"role":"user","content":"y"}]"#,
        r#""nvext":{"a":"messages"}"#,
        r#""messages":"x""#,
        r#""max_tokens":-1"#,
        r#""model":1"#,
        r#""x""#,
    ];

    fn string() -> impl Strategy<Value = String> {
        let piece = proptest::sample::select(&PIECES[..16]);
        let pieces = prop_oneof![
            8 => proptest::collection::vec(piece, 0..12),
            1 => proptest::collection::vec(proptest::sample::select(&PIECES[..]), 0..12),
        ];
        pieces.prop_map(|pieces| format!("\"{}\"", pieces.concat()))
    }

    fn message() -> impl Strategy<Value = String> {
        prop_oneof![
            12 => (string(), string(), any::<bool>()).prop_map(|(role, content, first)| {
                let role = format!("\"role\": {role}");
                let content = format!("\"content\":{content} ");
                let [one, other] = if first { [role, content] } else { [content, role] };
                format!("{{{one},{other}}}")
            }),
            1 => proptest::sample::select(&MESSAGES[..]).prop_map(str::to_owned),
            3 => proptest::sample::select(&MESSAGES[..9]).prop_map(str::to_owned),
        ]
    }

    fn body() -> impl Strategy<Value = String> {
        let field = || proptest::collection::vec(proptest::sample::select(&FIELDS[..]), 0..3);
        let messages = proptest::collection::vec(message(), 0..6);
        let edit = proptest::option::weighted(0.3, (any::<prop::sample::Index>(), any::<char>()));
        let padding = " ".repeat(MIN_BYTES);
        (field(), messages, field(), edit).prop_map(move |(before, messages, after, edit)| {
            let mut fields: Vec<String> = before.into_iter().map(str::to_owned).collect();
            fields.push(format!("\"messages\" : [{padding}{}]", messages.join(", ")));
            fields.extend(after.into_iter().map(str::to_owned));
            let mut body: Vec<char> = format!("{{{}}}", fields.join(",")).chars().collect();
            if let Some((index, char)) = edit {
                let at = index.index(body.len());
                body[at] = char;
            }
            body.into_iter().collect()
        })
    }

    proptest! {
        #![proptest_config(property_config(20_000))]

        #[test]
        fn plain_reader_equals_serde_json(body in body()) {
            match (chat::parse(&body), chat::parse_with_serde(&body)) {
                (Ok(ours), Ok(theirs)) => prop_assert_eq!(ours, theirs),
                (ours, theirs) => prop_assert_eq!(
                    ours.map_err(|error| error.to_string()),
                    theirs.map_err(|error| error.to_string())
                ),
            }
        }
    }

    #[test]
    fn nesting_limit_equals_that_of_serde() {
        for depth in 100..140 {
            let nested = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
            let padding = "x".repeat(MIN_BYTES);
            let body = format!(
                r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"{padding}","x":{nested}}}]}}]}}"#
            );
            let ours = chat::parse(&body).map_err(|error| error.to_string());
            let theirs = chat::parse_with_serde(&body).map_err(|error| error.to_string());
            assert_eq!(ours, theirs, "{depth}");
        }
    }

    #[test]
    fn usual_messages_are_read() {
        let text = "line \\n\\\"quoted\\\"".repeat(200);
        let body = format!(
            r#"{{"model":"m","tools":[{{"a":"]"}}],"messages": [{{"role":"user","content":"{text}"}} , {{"role":"tool","tool_call_id":"1","content":"y"}}] ,"stream":true}}"#
        );
        let read = read(&body).unwrap();
        assert_eq!(read.messages.len(), 2);
        assert_eq!(
            read.rest,
            r#"{"model":"m","tools":[{"a":"]"}],"messages": [] ,"stream":true}"#
        );
    }
}
