//! Prompts are never logged. A real process with maximum logging receives requests and responses
//! with a canary text in every field of clients and engines, valid and malformed. The canary may
//! appear only in messages to Envoy and to the client.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use proto::body_mutation::Mutation;
use proto::external_processor_client::ExternalProcessorClient;
use proto::processing_request::Request as Message;
use proto::processing_response::Response;
use serde_json::{Value, json};
use tonic::transport::Channel;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::ports::{FreePort, PATIENCE, ReadyCheck, wait_ready};

use crate::support::ext_proc::{self, body, headers};

/// Text in the fields of clients and engines.
const CANARY: &str = "CANARY-7f3a";
/// Text in ids. Ids may be logged, but must not become metric labels.
const NAME: &str = "NAMED-91bc";

/// A request body with its API path.
struct CanaryCase {
    path: &'static str,
    content_type: &'static str,
    body: Vec<u8>,
}

fn case(path: &'static str, body: &Value) -> CanaryCase {
    raw(path, body.to_string())
}

fn raw(path: &'static str, body: impl Into<Vec<u8>>) -> CanaryCase {
    CanaryCase {
        path,
        content_type: "application/json",
        body: body.into(),
    }
}

fn chat(body: &Value) -> CanaryCase {
    case("/v1/chat/completions", body)
}

fn completion(body: &Value) -> CanaryCase {
    case("/v1/completions", body)
}

/// Returns valid requests of every API.
fn valid_cases() -> Vec<CanaryCase> {
    let user = json!({"role": "user", "content": CANARY});
    let call = json!({"id": CANARY, "type": "function", "function": {"name": CANARY, "arguments": format!("{{\"a\":\"{CANARY}\"}}")}});
    let tool = json!({"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": {CANARY: CANARY}}});
    let form = format!(
        "--B\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\n{CANARY}\r\n--B\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"{CANARY}\"\r\n\r\n{CANARY}\r\n--B\r\n\
         Content-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--B--\r\n"
    );
    vec![
        chat(&json!({"model": "m", "messages": [user]})),
        chat(
            &json!({"model": "m", "cache_salt": CANARY, "user": CANARY, "tools": [tool], "documents": [{"text": CANARY}],
                "messages": [{"role": "system", "content": [{"type": "text", "text": CANARY}]}, user,
                    {"role": "assistant", "content": null, "tool_calls": [call], "reasoning": CANARY},
                    {"role": "tool", "tool_call_id": CANARY, "content": CANARY}],
                "nvext": {"annotations": [CANARY], "agent_hints": {"osl": CANARY}}}),
        ),
        completion(&json!({"model": "m", "prompt": [CANARY, CANARY], "suffix": CANARY})),
        case("/v1/embeddings", &json!({"model": "m", "input": CANARY})),
        case("/pooling", &json!({"model": "m", "messages": [user]})),
        case("/classify", &json!({"model": "m", "input": [CANARY]})),
        case(
            "/v1/responses",
            &json!({"model": "m", "input": [user], "instructions": CANARY, "previous_response_id": null}),
        ),
        case(
            "/v1/messages",
            &json!({"model": "m", "system": CANARY, "messages": [user], "max_tokens": 4}),
        ),
        case(
            "/v1/messages/count_tokens",
            &json!({"model": "m", "messages": [user]}),
        ),
        case(
            "/score",
            &json!({"model": "m", "text_1": CANARY, "text_2": [CANARY]}),
        ),
        case(
            "/v1/rerank",
            &json!({"model": "m", "query": CANARY, "documents": [CANARY]}),
        ),
        case("/tokenize", &json!({"model": "m", "prompt": CANARY})),
        case("/v1/audio/speech", &json!({"model": "m", "input": CANARY})),
        case(
            "/v1/images/generations",
            &json!({"model": "m", "prompt": CANARY}),
        ),
        CanaryCase {
            path: "/v1/audio/transcriptions",
            content_type: "multipart/form-data; boundary=B",
            body: form.into(),
        },
        case("/generate", &json!({"text": CANARY})),
        case(
            "/inference/v1/generate",
            &json!({"model": "m", "token_ids": [1, 2, 3], "features": CANARY}),
        ),
        case("/v1/somewhere", &json!({"prompt": CANARY})),
    ]
}

/// Returns requests that cannot be parsed or rendered.
fn invalid_cases() -> Vec<CanaryCase> {
    let mut cases = vec![
        chat(&json!({"model": "m", "messages": CANARY})),
        chat(&json!({"model": "m", "messages": [CANARY]})),
        chat(&json!({"model": "m", "messages": [{"content": CANARY}]})),
        chat(&json!({"model": "m", "messages": [{"role": "user", "content": {"x": CANARY}}]})),
        chat(&json!({"model": "m", "messages": [{"role": "user", "content": [{"type": CANARY}]}]})),
        chat(&json!({"model": "m", "messages": [{"role": CANARY, "content": CANARY}]})),
        chat(
            &json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": CANARY}),
        ),
        chat(
            &json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", CANARY: 1, "function": {"name": "f"}}]}),
        ),
        chat(
            &json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template": CANARY}),
        ),
        chat(&json!({"model": NAME, "messages": [{"role": "user", "content": CANARY}]})),
        chat(&json!({"model": [CANARY], "messages": [{"role": "user", "content": CANARY}]})),
        completion(&json!({"model": "m", "prompt": "x", "truncation_side": CANARY})),
        completion(&json!({"model": "m", "prompt": [1, CANARY]})),
        completion(&json!({"model": "m", "prompt": {"x": CANARY}})),
        completion(&json!({"model": "m", "prompt": "x", "max_tokens": CANARY})),
        case(
            "/v1/responses",
            &json!({"model": "m", "input": [{"type": CANARY, "content": CANARY}]}),
        ),
        case(
            "/v1/messages",
            &json!({"model": "m", "messages": [{"role": "user", "content": [{"type": CANARY}]}], "max_tokens": CANARY}),
        ),
        case("/generate", &json!({"text": {"x": CANARY}})),
        case("/score", &json!({"model": [CANARY], "text_1": CANARY})),
        raw("/v1/chat/completions", format!("{CANARY} is no JSON")),
        raw("/v1/chat/completions", format!("[\"{CANARY}\"]")),
        raw(
            "/v1/completions",
            [format!("{{\"prompt\":\"{CANARY}").into_bytes(), vec![0xff]].concat(),
        ),
        raw("/v1/audio/transcriptions", format!("--B\r\n{CANARY}")),
    ];
    // The valid requests, truncated in the middle: partial bodies, or malformed JSON.
    cases.extend(valid_cases().into_iter().map(|case| CanaryCase {
        body: case.body[..case.body.len() * 3 / 4].to_vec(),
        ..case
    }));
    cases
}

fn response_cases() -> [(&'static str, &'static str, String); 5] {
    let chunk = json!({"choices": [{"delta": {"content": CANARY}}], "usage": {"completion_tokens": CANARY}});
    let whole = json!({"model": "m", "choices": [{"message": {"content": CANARY}}], "usage": {"completion_tokens": 1}});
    [
        (
            "200",
            "text/event-stream",
            format!("data: {chunk}\n\ndata: {{\"{CANARY}\n\nevent: {CANARY}\n\ndata: [DONE]\n\n"),
        ),
        ("200", "application/json", whole.to_string()),
        (
            "200",
            "application/json",
            format!("{{\"usage\": \"{CANARY}"),
        ),
        (
            "500",
            "application/json",
            json!({"error": {"message": CANARY}}).to_string(),
        ),
        ("503", "text/plain", CANARY.to_owned()),
    ]
}

/// Returns all messages of an exchange in one of Envoy's body modes.
fn messages(case: &CanaryCase, at: usize, mode: i32) -> Vec<proto::ProcessingRequest> {
    let (status, kind, answer) = &response_cases()[at % response_cases().len()];
    let head = [
        (":method", "POST"),
        (":path", case.path),
        ("content-type", case.content_type),
        ("authorization", CANARY),
        ("cookie", CANARY),
        (CANARY, CANARY),
        ("x-session-id", NAME),
        ("x-request-id", "r-1"),
        ("x-warmroute-override", CANARY),
    ];
    // A partial buffer has no end, because Envoy truncates it at its limit.
    let end = mode != 3;
    let half = case.body.len() / 2;
    let mut messages = vec![Message::RequestHeaders(headers(&head))];
    if mode == 4 {
        messages.push(Message::RequestBody(body(&case.body[..half], false)));
        messages.push(Message::RequestBody(body(&case.body[half..], true)));
    } else {
        messages.push(Message::RequestBody(body(&case.body, end)));
    }
    let (first, rest) = answer.as_bytes().split_at(answer.len() / 2);
    messages.extend([
        Message::ResponseHeaders(headers(&[
            (":status", status),
            ("content-type", kind),
            ("x-answer", CANARY),
        ])),
        Message::ResponseBody(body(first, false)),
        Message::ResponseBody(body(rest, true)),
    ]);
    let configuration = proto::ProtocolConfiguration {
        request_body_mode: mode,
        response_body_mode: if mode == 4 { 4 } else { 1 },
        ..proto::ProtocolConfiguration::default()
    };
    let mut first = Some(configuration);
    let wire = |request| proto::ProcessingRequest {
        protocol_config: first.take(),
        ..ext_proc::message(request)
    };
    messages.into_iter().map(wire).collect()
}

fn is_response(message: &proto::ProcessingRequest) -> bool {
    matches!(
        message.request,
        Some(Message::ResponseHeaders(_) | Message::ResponseBody(_))
    )
}

/// Sends one exchange as Envoy does, with the response after the request was released. Returns the
/// replies.
async fn send(
    client: &ExternalProcessorClient<Channel>,
    messages: Vec<proto::ProcessingRequest>,
) -> String {
    let (sender, receiver) = tokio::sync::mpsc::channel(16);
    let (answer, request): (Vec<_>, Vec<_>) = messages.into_iter().partition(is_response);
    for message in request {
        sender.send(message).await.unwrap();
    }
    let mut sender = Some(sender);
    let mut answer = answer;
    let mut replies_text = String::new();
    let exchange = async {
        let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let mut replies = client.clone().process(stream).await.unwrap().into_inner();
        loop {
            let mut reply = match replies.message().await {
                Ok(None) => return,
                Err(status) => return writeln!(replies_text, "{status:?}").unwrap(),
                Ok(Some(reply)) => reply,
            };
            match &mut reply.response {
                Some(Response::ImmediateResponse(own)) => {
                    writeln!(
                        replies_text,
                        "{} {}",
                        own.details,
                        String::from_utf8_lossy(&own.body)
                    )
                    .unwrap();
                    sender = None;
                }
                // In full-duplex mode, warmroute returns the body to Envoy. All other parts of a
                // reply come from warmroute itself.
                Some(Response::RequestBody(body)) => {
                    let mutation = body
                        .response
                        .as_mut()
                        .and_then(|common| common.body_mutation.take());
                    let piece = mutation.and_then(|mutation| mutation.mutation);
                    let more = matches!(piece, Some(Mutation::StreamedResponse(piece)) if !piece.end_of_stream);
                    if let Some(sender) = sender.take_if(|_| !more) {
                        for message in answer.drain(..) {
                            sender.send(message).await.unwrap();
                        }
                    }
                }
                Some(Response::ResponseBody(body)) => {
                    body.response
                        .iter_mut()
                        .for_each(|common| common.body_mutation = None);
                }
                _ => {}
            }
            writeln!(replies_text, "{reply:?}").unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, exchange)
        .await
        .expect("the exchange did not end");
    replies_text
}

/// A server process with maximum logging and without engines.
struct CanarySite {
    child: ChildProcess,
    client: ExternalProcessorClient<Channel>,
    admin: String,
    dir: tempfile::TempDir,
}

impl CanarySite {
    async fn start(format: &str, strict: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ports = [FreePort::find().unwrap(), FreePort::find().unwrap()];
        let [tcp, admin] =
            [ports[0].number(), ports[1].number()].map(|port| format!("127.0.0.1:{port}"));
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models");
        let model = |name: &str| {
            json!({"name": name, "block_size": 16, "tokenizer": models.join("tinyllama/tokenizer.json.gz"),
                "tokenizer_config": models.join("tinyllama/tokenizer_config.json")})
        };
        let config = json!({
            "listeners": {"ext_proc": {"address": tcp}, "admin": {"address": admin}},
            "workers": {"file": "workers.yaml"},
            "models": [model("m"), model("n")],
            "process": {"log": {"level": "trace", "format": format}},
            "gateway": {
                "observe": "usage",
                "failure": {"strict_models": strict, "strict_bodies": strict},
            },
            "requests": {"clients": {"trusted": true}},
            "sessions": {},
        });
        std::fs::write(dir.path().join("warmroute.yaml"), config.to_string()).unwrap();
        let workers = "- {id: 1, endpoint: '10.0.0.1:8000', model: m}\n- {id: 2, endpoint: '10.0.0.2:8000', model: n}\n";
        std::fs::write(dir.path().join("workers.yaml"), workers).unwrap();
        ports.into_iter().for_each(|port| _ = port.release());
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command
            .args(["serve", "--config"])
            .arg(dir.path().join("warmroute.yaml"))
            .env("RUST_LOG", "trace");
        let child = ChildProcess::spawn("warmroute", &command, dir.path()).unwrap();
        let admin = format!("http://{admin}");
        wait_ready(
            ReadyCheck::Http(&format!("{admin}/readyz")),
            PATIENCE,
            &child,
        )
        .await
        .unwrap();
        let client = ExternalProcessorClient::connect(format!("http://{tcp}"))
            .await
            .unwrap();
        Self {
            child,
            client,
            admin,
            dir,
        }
    }

    async fn page(&self, page: &str) -> String {
        let http = warmroute_runtime::tls::http_client_builder();
        let page = http.build().unwrap().get(format!("{}/{page}", self.admin));
        page.send().await.unwrap().text().await.unwrap()
    }

    /// Ends the process and returns all of its output.
    fn log(self) -> String {
        self.child.terminate();
        assert!(
            self.child.wait_exit(Instant::now() + PATIENCE).is_some(),
            "the process does not exit"
        );
        let log = std::fs::read_to_string(self.child.log()).unwrap();
        drop(self.dir);
        log
    }
}

fn assert_absent(canary: &str, what: &str, text: &str) {
    let found = text.find(canary).map(|at| {
        let from = text[..at].rfind('\n').map_or(0, |line| line + 1);
        let to = text[at..].find('\n').map_or(text.len(), |line| at + line);
        &text[from..to]
    });
    assert_eq!(found, None, "{canary} in {what}");
}

async fn assert_canary_never_appears(format: &str, strict: bool) {
    let site = CanarySite::start(format, strict).await;
    // Request body modes: full duplex, and in long tests also buffered and buffered partial.
    let modes: &[i32] = if cfg!(long_tests) { &[2, 3, 4] } else { &[4] };
    let mut refused = 0;
    for (at, case) in valid_cases().iter().chain(&invalid_cases()).enumerate() {
        for &mode in modes {
            let replies_text = send(&site.client, messages(case, at, mode)).await;
            assert_absent(
                CANARY,
                &format!("the replies to {} {at} with mode {mode}", case.path),
                &replies_text,
            );
            refused += usize::from(replies_text.contains("warmroute_refused"));
        }
    }
    assert_eq!(
        refused > 6 * modes.len(),
        strict,
        "{refused} requests were rejected"
    );
    for page in [
        "",
        "metrics",
        "readyz",
        "debug",
        "debug/config",
        "debug/fleet",
        "debug/index",
        "debug/load",
    ] {
        let text = site.page(page).await;
        assert!(!text.is_empty());
        assert_absent(CANARY, page, &text);
        assert_absent(NAME, page, &text);
    }
    let log = site.log();
    for phrase in [
        "TRACE",
        "routed",
        if strict {
            "unreadable body"
        } else {
            "prompt refused"
        },
    ] {
        assert!(log.contains(phrase), "the log lacks {phrase}");
    }
    assert_absent(CANARY, "the log", &log);
    // The log is in the watched directory of the workers file.
    assert_absent("inotify event", "the log", &log);
}

#[tokio::test]
async fn prompts_and_answers_never_appear_in_output() {
    assert_canary_never_appears("text", false).await;
}

#[tokio::test]
async fn request_text_never_appears_in_json_logs() {
    assert_canary_never_appears("json", true).await;
}
