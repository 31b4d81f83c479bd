//! Id of a response, read from the beginning of its body. The id leads later requests to the engine
//! that stores the response.

use super::body_encoding::without_byte_order_mark;
use super::json_edit::text_at_path;

/// Maximum number of bytes that are searched for the id. Engines send it first.
const MAX_BYTES: usize = 64 << 10;

/// Reads the id of one response of the Responses API, from a document or from an event stream.
#[derive(Debug, Default)]
pub struct ResponseIdReader {
    bytes: Vec<u8>,
    is_done: bool,
}

impl ResponseIdReader {
    /// Reads the next bytes of the body. Returns the id once, when it is complete.
    pub fn push(&mut self, chunk: &[u8]) -> Option<String> {
        if self.is_done {
            return None;
        }
        let room = MAX_BYTES - self.bytes.len();
        self.bytes
            .extend_from_slice(&chunk[..chunk.len().min(room)]);
        let id = find_response_id(&self.bytes);
        if id.is_some() || self.bytes.len() == MAX_BYTES {
            self.is_done = true;
            self.bytes = Vec::new();
        }
        id
    }
}

fn find_response_id(body: &[u8]) -> Option<String> {
    let body = without_byte_order_mark(body).trim_ascii_start();
    if body.starts_with(b"{") {
        return id_at(body, "id");
    }
    let mut lines = body.split(|byte| matches!(byte, b'\n' | b'\r'));
    lines.find_map(|line| id_at(line.strip_prefix(b"data:")?, "response.id"))
}

/// Returns the id at a path of a document whose end may be missing.
fn id_at(document: &[u8], path: &str) -> Option<String> {
    text_at_path(document, path).filter(|id| !id.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that the id is read once, however the body is split.
    fn assert_id(body: &str, expected: Option<&str>) {
        for size in [1, 2, 7, 40, body.len()] {
            let mut reader = ResponseIdReader::default();
            let ids: Vec<_> = body
                .as_bytes()
                .chunks(size)
                .filter_map(|piece| reader.push(piece))
                .collect();
            assert_eq!(ids, Vec::from_iter(expected), "{body} in pieces of {size}");
        }
    }

    #[test]
    fn id_is_read_from_documents_and_streams() {
        let created = r#"event: response.created
data: {"response":{"id":"resp_1","created_at":1,"output":[{"id":"msg_9"}]},"sequence_number":0,"type":"response.created"}

"#;
        let progress = created.replace("created", "in_progress");
        assert_id(created, Some("resp_1"));
        assert_id(&created.replace('\n', "\r\n"), Some("resp_1"));
        assert_id(&format!(": ping\n\n{created}{progress}"), Some("resp_1"));
        let late =
            r#"data: {"type":"response.created","response":{"object":"response","id":"resp_2"}}"#;
        assert_id(late, Some("resp_2"));
        assert_id(
            r#" {"output":[{"id":"msg"}],"id":"resp_3"}"#,
            Some("resp_3"),
        );
        for none in [
            r#"{"output":[{"id":"msg"}],"id":""}"#,
            r#"{"id":7}"#,
            "data: {\"id\":\"chatcmpl-1\",\"choices\":[]}\n\ndata: [DONE]\n\n",
            "\u{1f}\u{8b} compressed",
        ] {
            assert_id(none, None);
        }
    }

    #[test]
    fn search_for_id_is_bounded() {
        let mut reader = ResponseIdReader::default();
        for _ in 0..9 {
            assert_eq!(reader.push(&[b' '; 8 << 10]), None);
        }
        assert_eq!(reader.push(br#"{"id":"resp_1"}"#), None);
        assert_eq!(reader.bytes.capacity(), 0);
    }
}
