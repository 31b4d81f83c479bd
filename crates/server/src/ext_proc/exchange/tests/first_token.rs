//! The first token of a response is its first content, in the event order of vLLM, SGLang and front
//! ends of the Messages API, for every body mode and observer.

use super::*;
use crate::ext_proc::config::ObserveMode;
use crate::ext_proc::response_content::MissingContent;

/// An event stream: the events before the first content, the first content, and the rest.
struct EventOrder {
    name: &'static str,
    before: Vec<String>,
    content: String,
    after: Vec<String>,
}

fn data(json: &str) -> String {
    format!("data: {json}\n\n")
}

fn typed(kind: &str, fields: &str) -> String {
    format!("event: {kind}\ndata: {{{fields}\"type\":\"{kind}\"}}\n\n")
}

fn chat(delta: &str, finish_reason: &str) -> String {
    data(&format!(
        r#"{{"id":"c","object":"chat.completion.chunk","choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish_reason}}}]}}"#
    ))
}

fn event_orders() -> Vec<EventOrder> {
    [
        openai_event_orders(),
        responses_event_orders(),
        messages_event_orders(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn openai_event_orders() -> Vec<EventOrder> {
    let done = || data("[DONE]");
    vec![
        EventOrder {
            name: "completions",
            before: vec![": ping\n\n".to_owned()],
            content: data(
                r#"{"object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":null}]}"#,
            ),
            after: vec![done()],
        },
        EventOrder {
            name: "chat of vLLM",
            before: vec![chat(r#"{"role":"assistant","content":""}"#, "null")],
            content: chat(r#"{"content":"a"}"#, "null"),
            after: vec![chat("{}", r#""stop""#), done()],
        },
        EventOrder {
            name: "chat of SGLang",
            before: vec![chat(
                r#"{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null}"#,
                "null",
            )],
            content: chat(
                r#"{"role":null,"content":null,"reasoning_content":"hm","tool_calls":null}"#,
                "null",
            ),
            after: vec![done()],
        },
    ]
}

fn responses_event_orders() -> Vec<EventOrder> {
    let response = r#""response":{"id":"r","object":"response","output":[],"usage":null},"sequence_number":0,"#;
    vec![EventOrder {
        name: "responses of vLLM",
        before: vec![
            typed("response.created", response),
            typed("response.in_progress", response),
            typed(
                "response.output_item.added",
                r#""item":{"type":"message","content":[]},"#,
            ),
            typed(
                "response.content_part.added",
                r#""part":{"type":"output_text","text":""},"#,
            ),
        ],
        content: typed(
            "response.output_text.delta",
            r#""delta":"a","logprobs":[],"#,
        ),
        after: vec![
            typed("response.output_text.done", r#""text":"a","#),
            typed("response.completed", response),
        ],
    }]
}

fn messages_event_orders() -> Vec<EventOrder> {
    let message =
        r#""message":{"id":"m","content":[],"usage":{"input_tokens":9,"output_tokens":0}},"#;
    vec![
        EventOrder {
            name: "messages of vLLM",
            before: vec![
                typed("message_start", message),
                typed(
                    "content_block_start",
                    r#""index":0,"content_block":{"type":"thinking","thinking":""},"#,
                ),
            ],
            content: typed(
                "content_block_delta",
                r#""delta":{"type":"thinking_delta","thinking":"hm"},"#,
            ),
            after: vec![
                typed("content_block_stop", r#""index":0,"#),
                typed("message_stop", ""),
            ],
        },
        EventOrder {
            name: "messages of a front end",
            before: vec![
                typed("message_start", message),
                typed(
                    "content_block_start",
                    r#""index":0,"content_block":{"type":"text","text":""},"#,
                ),
                typed("ping", ""),
                typed("ping", ""),
            ],
            content: typed(
                "content_block_delta",
                r#""delta":{"type":"text_delta","text":"a"},"#,
            ),
            after: vec![typed("message_stop", "")],
        },
    ]
}

/// Returns an exchange whose event stream has begun.
fn streaming(observe: ObserveMode, request: BodyMode, response_mode: BodyMode) -> Exchange {
    let modes = BodyModes {
        request,
        response: response_mode,
    };
    let options = ExchangeOptions {
        observe,
        ..options()
    };
    let mut exchange = exchange_with(options, ExchangeStart::default(), modes);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    exchange.on_route(to_worker());
    let lines = describe(exchange.on_message(response(true, false)));
    assert!(!lines.contains(&"first token".to_owned()), "{lines:?}");
    exchange
}

fn send(exchange: &mut Exchange, bytes: &[u8], end: bool) -> Vec<String> {
    let mut lines = describe(exchange.on_message(response_body(bytes, end)));
    lines.retain(|line| !line.starts_with("response "));
    lines
}

#[test]
fn first_content_is_first_token_in_every_mode() {
    let observed = [
        ObserveMode::FirstToken,
        ObserveMode::Usage,
        ObserveMode::Sampled(0.5),
    ];
    let modes = [
        (BodyMode::Buffered, BodyMode::None),
        (BodyMode::Buffered, BodyMode::Streamed),
        (BodyMode::FullDuplexStreamed, BodyMode::FullDuplexStreamed),
    ];
    let cases = observed
        .into_iter()
        .flat_map(|observe| modes.map(|modes| (observe, modes)));
    for (observe, (request, response_mode)) in cases {
        for order in event_orders() {
            for size in [1, 5, 1000] {
                let mut exchange = streaming(observe, request, response_mode);
                let name = order.name;
                for event in &order.before {
                    for piece in event.as_bytes().chunks(size) {
                        assert!(send(&mut exchange, piece, false).is_empty(), "{name}");
                    }
                    assert!(exchange.observes_no_content());
                }
                let content = order.content.as_bytes().chunks(size);
                let lines: Vec<String> = content
                    .flat_map(|piece| send(&mut exchange, piece, false))
                    .collect();
                assert_eq!(
                    lines,
                    ["first token"],
                    "{name}, {observe}, {response_mode:?}"
                );
                assert!(!exchange.observes_no_content());
                let after = order.after.concat();
                assert!(
                    send(&mut exchange, after.as_bytes(), false).is_empty(),
                    "{name}"
                );
                assert_eq!(send(&mut exchange, b"", true), ["finished"], "{name}");
            }
        }
    }
}

#[test]
fn several_events_in_one_piece_are_read() {
    for order in event_orders() {
        let mut exchange = streaming(ObserveMode::FirstToken, BodyMode::Buffered, BodyMode::None);
        let all = order.before.concat() + &order.content + &order.after.concat();
        assert_eq!(
            send(&mut exchange, all.replace('\n', "\r\n").as_bytes(), true),
            ["first token", "finished"],
            "{}",
            order.name
        );
    }
}

#[test]
fn response_without_content_ends_with_its_reason() {
    let role = chat(r#"{"role":"assistant","content":""}"#, "null");
    let error = data(r#"{"error":{"message":"CUDA error","code":500}}"#);
    let cases = [
        (String::new(), "Empty"),
        (role.clone() + &data("[DONE]"), "Empty"),
        (role.clone() + &chat("{}", r#""stop""#), "OutputEnded"),
        (role + &error + &data("[DONE]"), "Error"),
        (
            typed("message_start", "") + &typed("error", r#""error":{},"#),
            "Error",
        ),
    ];
    for (text, reason) in cases {
        for trailers in [false, true] {
            let mut exchange =
                streaming(ObserveMode::FirstToken, BodyMode::Buffered, BodyMode::None);
            let mut lines = send(&mut exchange, text.as_bytes(), !trailers);
            if trailers {
                lines.extend(describe(
                    exchange.on_message(ExchangeMessage::ResponseTrailers),
                ));
                lines.retain(|line| line != "response trailers");
            }
            let missing = format!("content missing {reason}");
            assert_eq!(lines, [missing.as_str(), "finished"], "{text}");
            assert!(!exchange.observes_no_content());
        }
    }
}

#[test]
fn last_event_without_empty_line_is_content() {
    let mut exchange = streaming(ObserveMode::FirstToken, BodyMode::Buffered, BodyMode::None);
    let event = chat(r#"{"content":"a"}"#, "null");
    assert!(send(&mut exchange, event.trim_end().as_bytes(), false).is_empty());
    assert_eq!(send(&mut exchange, b"", true), ["first token", "finished"]);
}

#[test]
fn first_byte_of_unknown_format_is_first_token() {
    for bytes in [
        &b"\x1f\x8b\x08"[..],
        b"\x28\xb5\x2f\xfd",
        b"{\"id\":1}",
        b"data: hello\n\n",
    ] {
        let mut exchange = streaming(ObserveMode::FirstToken, BodyMode::Buffered, BodyMode::None);
        assert_eq!(
            send(&mut exchange, bytes, false),
            ["first token"],
            "{bytes:?}"
        );
    }
}

#[test]
fn empty_document_has_no_content() {
    let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    exchange.on_route(to_worker());
    let lines = describe(exchange.on_message(response(false, true)));
    assert_eq!(
        lines[1..],
        ["status 200", "content missing Empty", "finished"]
    );
}

#[test]
fn probe_reports_decide_first_token_and_end() {
    let probed = |is_event_stream| {
        let start = ExchangeStart {
            exchange_key: Some("7".into()),
            ..ExchangeStart::default()
        };
        let modes = BodyModes {
            request: BodyMode::Buffered,
            response: BodyMode::None,
        };
        let mut exchange = exchange_with(options(), start, modes);
        exchange.on_message(headers(CHAT, false));
        exchange.on_message(body(b"{}", true));
        exchange.on_route(to_worker());
        exchange.on_message(response(is_event_stream, false));
        assert!(!exchange.observes_no_content());
        exchange
    };
    let empty = ContentReport::Ended(MissingContent::Empty);
    let cases = [
        (true, ContentReport::Content, &["first token"][..]),
        (true, ContentReport::Stopped, &["first token"]),
        (true, empty, &["content missing Empty", "finished"]),
        (false, empty, &["content missing Empty", "finished"]),
    ];
    for (is_event_stream, report, expected) in cases {
        let mut exchange = probed(is_event_stream);
        assert_eq!(describe(exchange.on_content_report(report)), expected);
        let again = exchange.on_content_report(ContentReport::Content);
        assert!(again.is_empty(), "only once");
        let end = describe(exchange.on_message(ExchangeMessage::ResponseTrailers));
        assert_eq!(end.contains(&"finished".to_owned()), report != empty);
    }
}
