//! Detection of the first content of a response. Engines and their front ends send events before the
//! first token: a role, `response.created`, `message_start`, pings and comments.
//!
//! The format is recognized from the first bytes, so the headers of the response are not needed. A
//! body that is not an event stream, for example a JSON document or a compressed stream, begins with
//! its first content.

use super::{OutputEvidence, ResponseEncoding, UsageScanner};

/// Beginnings of the lines of an event stream.
const LINE_STARTS: [&[u8]; 5] = [b":", b"data:", b"event:", b"id:", b"retry:"];

/// Byte order mark that may precede an event stream.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Detects the first content of one response.
#[derive(Debug)]
pub struct ContentDetector {
    state: DetectorState,
}

#[derive(Debug)]
enum DetectorState {
    /// The bytes so far may begin an event stream.
    Undecided(Vec<u8>),
    /// The body is an event stream without content so far.
    Events(Box<UsageScanner>),
    /// Content was detected.
    Found,
}

impl Default for ContentDetector {
    fn default() -> Self {
        Self {
            state: DetectorState::Undecided(Vec::new()),
        }
    }
}

impl ContentDetector {
    /// Reads the next bytes of the body. Returns true if they complete the first content.
    pub fn push(&mut self, chunk: &[u8]) -> bool {
        match &mut self.state {
            DetectorState::Found => return false,
            DetectorState::Events(scanner) => scanner.push(chunk),
            DetectorState::Undecided(bytes) => {
                bytes.extend_from_slice(chunk);
                let start = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
                let start = start.trim_ascii_start();
                if LINE_STARTS.iter().any(|line| start.starts_with(line)) {
                    let mut scanner = UsageScanner::new(ResponseEncoding::EventStream);
                    scanner.push(start);
                    self.state = DetectorState::Events(Box::new(scanner));
                } else if LINE_STARTS
                    .iter()
                    .chain([&BYTE_ORDER_MARK])
                    .all(|line| !line.starts_with(start))
                {
                    self.state = DetectorState::Found;
                    return true;
                } else {
                    *bytes = start.to_vec();
                }
            }
        }
        self.is_first_content()
    }

    /// Handles the end of the body. Returns true if it completes the first content: the last event
    /// may lack the empty line that ends it.
    pub fn finish(&mut self) -> bool {
        match &mut self.state {
            DetectorState::Found => false,
            DetectorState::Events(scanner) => {
                scanner.finish();
                self.is_first_content()
            }
            DetectorState::Undecided(bytes) => {
                let is_found = !bytes.is_empty();
                if is_found {
                    self.state = DetectorState::Found;
                }
                is_found
            }
        }
    }

    /// Returns the strongest evidence of output so far.
    pub fn evidence(&self) -> OutputEvidence {
        match &self.state {
            DetectorState::Undecided(_) => OutputEvidence::None,
            DetectorState::Events(scanner) => scanner.evidence(),
            DetectorState::Found => OutputEvidence::Content,
        }
    }

    fn is_first_content(&mut self) -> bool {
        let is_found = self.evidence() == OutputEvidence::Content;
        if is_found {
            self.state = DetectorState::Found;
        }
        is_found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chat chunk with one choice.
    fn chunk(choice: &str) -> String {
        format!(
            "data: {{\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,{choice}}}]}}\n\n"
        )
    }

    /// Event of the Responses or Messages API.
    fn typed(kind: &str, fields: &str) -> String {
        format!("event: {kind}\ndata: {{{fields}\"type\":\"{kind}\"}}\n\n")
    }

    fn response_object(fields: &str) -> String {
        format!("\"response\":{{\"id\":\"r\",\"instructions\":\"be\",\"error\":null,{fields}}},")
    }

    /// Asserts that the content of a body is complete at the end of `content` and not earlier,
    /// however the body is split.
    fn assert_first_content(before: &[String], content: &str, name: &str) {
        for newline in ["\n", "\r\n"] {
            let convert = |text: &str| text.replace('\n', newline).into_bytes();
            let before = convert(&before.concat());
            let content = convert(content);
            for size in [1, 2, 3, 7, 64, before.len().max(1)] {
                let mut detector = ContentDetector::default();
                for piece in before.chunks(size) {
                    assert!(!detector.push(piece), "{name}: before the content");
                }
                assert_ne!(detector.evidence(), OutputEvidence::Content, "{name}");
                let found = content
                    .chunks(size)
                    .filter(|piece| detector.push(piece))
                    .count();
                assert_eq!(found, 1, "{name} in pieces of {size}");
                assert!(
                    !detector.push(b"data: {}\n\n") && !detector.finish(),
                    "{name}"
                );
                assert_eq!(detector.evidence(), OutputEvidence::Content, "{name}");
            }
            let mut whole = ContentDetector::default();
            assert!(whole.push(&[before, content].concat()), "{name} at once");
        }
    }

    fn chat_role_chunks() -> Vec<String> {
        vec![
            ": keep-alive\n\n".to_owned(),
            chunk(r#""delta":{"role":"assistant","content":""},"finish_reason":null"#),
            // SGLang and Dynamo send every member.
            chunk(
                r#""delta":{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null,"refusal":null},
                "logprobs":null,"finish_reason":null,"matched_stop":null"#,
            )
            .replace("\n  ", " "),
            chunk(r#""delta":{"content":""},"token_ids":[],"logprobs":{"content":[]}"#),
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":0}}\n\n".to_owned(),
            "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n".to_owned(),
            "data:\n\n".to_owned(),
        ]
    }

    #[test]
    fn chat_and_completion_content_is_detected() {
        let cases = [
            ("text", r#""delta":{"content":"a"}"#),
            ("reasoning", r#""delta":{"content":null,"reasoning":"hm"}"#),
            ("reasoning content", r#""delta":{"reasoning_content":"hm"}"#),
            ("refusal", r#""delta":{"refusal":"no"}"#),
            (
                "tool call",
                r#""delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}"#,
            ),
            ("function call", r#""delta":{"function_call":{"name":"f"}}"#),
            ("audio", r#""delta":{"audio":{"data":"AAAA"}}"#),
            ("unknown member", r#""delta":{"image":"x"}"#),
            ("token ids", r#""delta":{"content":""},"token_ids":[5]"#),
            (
                "chat logprobs",
                r#""delta":{"content":""},"logprobs":{"content":[{"token":"a"}]}"#,
            ),
            ("completion", r#""text":"a","finish_reason":null"#),
            (
                "completion logprobs",
                r#""text":"","logprobs":{"tokens":["a"]}"#,
            ),
        ];
        for (name, choice) in cases {
            assert_first_content(&chat_role_chunks(), &chunk(choice), name);
        }
        let native =
            "data: {\"text\":\"\",\"output_ids\":[3],\"meta_info\":{\"completion_tokens\":1}}\n\n";
        assert_first_content(&[], native, "SGLang's native API");
    }

    #[test]
    fn responses_api_content_is_detected() {
        let created = [
            typed(
                "response.created",
                &response_object("\"output\":[],\"usage\":null"),
            ),
            typed(
                "response.in_progress",
                &response_object("\"output\":[],\"usage\":null"),
            ),
        ];
        let announced = [
            typed(
                "response.output_item.added",
                r#""item":{"id":"m","type":"message","role":"assistant","content":[],"status":"in_progress"},"#,
            ),
            typed(
                "response.content_part.added",
                r#""part":{"type":"output_text","text":"","annotations":[]},"#,
            ),
            typed("response.output_text.delta", r#""delta":"","logprobs":[],"#),
        ];
        let before = [&created[..], &announced].concat();
        let cases = [
            (
                "response.output_text.delta",
                r#""delta":"a","logprobs":[],"#,
            ),
            ("response.reasoning_text.delta", r#""delta":"hm","#),
            ("response.refusal.delta", r#""delta":"no","#),
            ("response.audio.delta", r#""delta":"AAAA","#),
            ("response.function_call_arguments.delta", r#""delta":"{","#),
            (
                "response.output_item.added",
                r#""item":{"type":"function_call","name":"f","arguments":"","call_id":"c"},"#,
            ),
            ("response.output_text.done", r#""text":"a","#),
            (
                "response.completed",
                &response_object("\"output\":[{\"type\":\"message\"}]"),
            ),
        ];
        for (kind, fields) in cases {
            assert_first_content(&created, &typed(kind, fields), kind);
            assert_first_content(&before, &typed(kind, fields), kind);
        }
    }

    #[test]
    fn messages_api_content_is_detected() {
        let start = r#""message":{"id":"m","type":"message","role":"assistant","content":[],"stop_reason":null,
            "usage":{"input_tokens":25,"output_tokens":1}},"#;
        let before = [
            typed("message_start", &start.replace('\n', " ")),
            typed("ping", ""),
            typed(
                "content_block_start",
                r#""index":0,"content_block":{"type":"text","text":""},"#,
            ),
            typed(
                "content_block_start",
                r#""index":0,"content_block":{"type":"thinking","thinking":"","signature":""},"#,
            ),
            "event: ping\ndata: {}\n\n".to_owned(),
            typed(
                "content_block_delta",
                r#""delta":{"type":"text_delta","text":""},"#,
            ),
        ];
        let cases = [
            (
                "content_block_delta",
                r#""delta":{"type":"text_delta","text":"a"},"#,
            ),
            (
                "content_block_delta",
                r#""delta":{"type":"thinking_delta","thinking":"hm"},"#,
            ),
            (
                "content_block_delta",
                r#""delta":{"type":"input_json_delta","partial_json":"{"},"#,
            ),
            (
                "content_block_start",
                r#""content_block":{"type":"tool_use","id":"t","name":"f","input":{}},"#,
            ),
        ];
        for (kind, fields) in cases {
            assert_first_content(&before, &typed(kind, fields), fields);
        }
    }

    #[test]
    fn other_formats_begin_with_content() {
        let cases: [(&str, &[u8]); 8] = [
            ("document", b"{\"id\":1}"),
            ("padded document", b" \n{\"id\":1}"),
            ("gzip", b"\x1f\x8b\x08\x00"),
            ("zstd", b"\x28\xb5\x2f\xfd"),
            ("lines of JSON", b"{\"choices\":[]}\n"),
            ("almost an event", b"date: x\n\n"),
            ("text event", b"data: hello\n\n"),
            (
                "unknown event",
                b"data: {\"type\":\"transcript.text.delta\",\"delta\":\"a\"}\n\n",
            ),
        ];
        for (name, body) in cases {
            for size in [1, 2, 5, 100] {
                let mut detector = ContentDetector::default();
                let found = body
                    .chunks(size)
                    .filter(|piece| detector.push(piece))
                    .count();
                assert_eq!(found, 1, "{name}");
            }
        }
    }

    #[test]
    fn end_of_response_completes_its_evidence() {
        let role = chunk(r#""delta":{"role":"assistant","content":""}"#);
        let stop = chunk(r#""delta":{},"finish_reason":"stop""#);
        let failed = typed("response.failed", &response_object("\"output\":[]"));
        let one_token = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":1}}\n\n";
        let delta = typed("message_delta", r#""delta":{"stop_reason":"end_turn"},"#);
        let cases = [
            (String::new(), OutputEvidence::None),
            ("\n".to_owned(), OutputEvidence::None),
            ("da".to_owned(), OutputEvidence::Content),
            (
                ": ping\n\ndata: [DONE]\n\n".to_owned(),
                OutputEvidence::None,
            ),
            (role.clone() + "data: [DONE]\n\n", OutputEvidence::None),
            (role.clone() + &stop, OutputEvidence::Ended),
            (role.clone() + one_token, OutputEvidence::Counted),
            (delta, OutputEvidence::Ended),
            (typed("message_stop", ""), OutputEvidence::Ended),
            (
                role + "data: {\"error\":{\"message\":\"CUDA error\",\"code\":500}}\n\ndata: [DONE]\n\n",
                OutputEvidence::Error,
            ),
            (
                typed("error", r#""error":{"type":"overloaded_error"},"#),
                OutputEvidence::Error,
            ),
            (failed, OutputEvidence::Error),
            (
                "data: {\"choices\":[{\"text\":\"a\"}]}".to_owned(),
                OutputEvidence::Content,
            ),
        ];
        for (body, expected) in cases {
            let mut detector = ContentDetector::default();
            assert!(!detector.push(body.as_bytes()), "{body}");
            assert_eq!(
                detector.finish(),
                expected == OutputEvidence::Content,
                "{body}"
            );
            assert!(!detector.finish(), "only once");
            assert_eq!(detector.evidence(), expected, "{body}");
        }
    }

    #[test]
    fn waiting_detector_holds_no_large_buffer() {
        let mut detector = ContentDetector::default();
        let large = "x".repeat(300_000);
        let created = typed(
            "response.created",
            &response_object(&format!("\"tools\":\"{large}\"")),
        );
        for piece in created.as_bytes().chunks(16_384) {
            assert!(!detector.push(piece));
        }
        let DetectorState::Events(scanner) = &detector.state else {
            panic!("an event stream")
        };
        let held = scanner.line.bytes.capacity() + scanner.event.data.capacity();
        assert!(held <= 2 * super::super::MAX_RETAINED_BYTES, "{held}");
    }
}
