//! Engine sessions of a whole server.

use super::*;
use crate::start_app;

fn header(key: &str, value: &str) -> HeaderValue {
    HeaderValue {
        key: key.to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    }
}

/// A started warmroute server in front of one engine.
struct SessionStack {
    client: ExternalProcessorClient<Channel>,
    stop: CancellationToken,
    running: JoinHandle<anyhow::Result<()>>,
    /// Number of requests that extended their message timeout because they wait.
    waiting: watch::Sender<usize>,
}

impl SessionStack {
    /// Starts the server. `more` is appended to the session settings.
    async fn start(engine: &SessionEngine, sessions: &str, more: &str) -> Self {
        let text = format!(
            "listeners: {{ext_proc: {{address: '127.0.0.1:0'}}, admin: {{address: '127.0.0.1:0'}}}}\nmodels: [{{name: m}}]\n\
             workers: {{list: [{{id: 1, endpoint: '{}'}}]}}\nsessions: {{engine: {{kind: sglang{sessions}}}}}\n\
             process: {{drain: {{grace_period: 0s}}}}\n{more}",
            engine.address
        );
        let app =
            start_app(Config::parse(std::path::Path::new("w.yaml"), text.as_bytes()).unwrap())
                .await;
        let address = app.ext_proc_address.unwrap();
        let stop = CancellationToken::new();
        let running = tokio::spawn(app.run_until(stop.clone().cancelled_owned()));
        let client = ExternalProcessorClient::connect(format!("http://{address}"))
            .await
            .unwrap();
        Self {
            client,
            stop,
            running,
            waiting: watch::Sender::new(0),
        }
    }

    /// Sends a request in the background. The task ends when the request is routed.
    fn send(&self, session: &[(&str, &str)], body: &str) -> JoinHandle<()> {
        let head = [(":method", "POST"), (":path", "/v1/completions")];
        let head = head
            .iter()
            .chain(session)
            .map(|(key, value)| header(key, value))
            .collect();
        let headers = Some(HeaderMap { headers: head });
        let messages = [
            Message::RequestHeaders(proto::HttpHeaders {
                headers,
                ..proto::HttpHeaders::default()
            }),
            Message::RequestBody(proto::HttpBody {
                body: body.as_bytes().to_vec(),
                end_of_stream: true,
                ..proto::HttpBody::default()
            }),
        ];
        let request = |message| proto::ProcessingRequest {
            request: Some(message),
            ..proto::ProcessingRequest::default()
        };
        let mut client = self.client.clone();
        let waiting = self.waiting.clone();
        tokio::spawn(async move {
            // The stream stays open, as Envoy keeps it while the request runs.
            let (sender, receiver) = mpsc::channel(2);
            for message in messages.map(request) {
                sender.send(message).await.unwrap();
            }
            let mut answers = client
                .process(ReceiverStream::new(receiver))
                .await
                .unwrap()
                .into_inner();
            let mut replies = 0;
            while replies < 2 {
                let answer = answers.message().await.unwrap().unwrap();
                // A reply without a response only extends the message timeout.
                match answer.response {
                    Some(_) => replies += 1,
                    None => waiting.send_modify(|count| *count += 1),
                }
            }
            drop(sender);
            while answers.message().await.unwrap().is_some() {}
        })
    }

    async fn stop(self) {
        drop(self.client);
        self.stop.cancel();
        self.running.await.unwrap().unwrap();
    }
}

const BODY: &str = r#"{"model": "m", "prompt": "x"}"#;

#[tokio::test]
async fn server_opens_session_and_closes_it_on_shutdown() {
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let stack = SessionStack::start(&engine, "", "").await;
    stack.send(&[("x-session-id", "s")], BODY).await.unwrap();
    assert_eq!(engine.received_calls(1).await, [open("s")]);
    stack.stop().await;
    assert_eq!(engine.calls(), [open("s"), close("s")]);
}

#[tokio::test]
async fn requests_wait_until_session_is_open() {
    let engine = SessionEngine::start(EngineBehaviour::Held).await;
    let stack = SessionStack::start(
        &engine,
        ", timeout: 20s",
        "engines: {http: {timeout: 20s}}\n",
    )
    .await;
    let first = stack.send(&[("x-session-id", "s")], BODY);
    engine.received_calls(1).await;
    let second = stack.send(&[("x-session-id", "s")], BODY);
    let mut waiting = stack.waiting.subscribe();
    let both = waiting.wait_for(|count| *count == 2);
    assert!(tokio::time::timeout(DEADLINE, both).await.is_ok());
    // A request without a session does not wait.
    stack.send(&[], BODY).await.unwrap();
    assert!(
        !first.is_finished() && !second.is_finished(),
        "sent before the session was open"
    );
    engine.state.send_modify(|state| state.released = true);
    first.await.unwrap();
    second.await.unwrap();
    assert_eq!(engine.calls(), [open("s")]);
    stack.stop().await;
}

#[tokio::test]
async fn requests_are_sent_when_opening_exceeds_its_deadline() {
    let engine = SessionEngine::start(EngineBehaviour::Never).await;
    let stack = SessionStack::start(&engine, ", timeout: 300ms", "").await;
    let began = Instant::now();
    tokio::time::timeout(DEADLINE, stack.send(&[("x-session-id", "s")], BODY))
        .await
        .unwrap()
        .unwrap();
    assert!(
        began.elapsed() >= Duration::from_millis(250),
        "{:?}",
        began.elapsed()
    );
    stack.stop().await;
}

#[tokio::test]
async fn session_calls_carry_the_token_of_engines() {
    let engine = SessionEngine::start(EngineBehaviour::Protected).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "secret\n").unwrap();
    let stack = SessionStack::start(
        &engine,
        "",
        &format!("engines: {{http: {{token_file: '{}'}}}}\n", file.display()),
    )
    .await;
    stack.send(&[("x-session-id", "s")], BODY).await.unwrap();
    assert_eq!(engine.calls(), [open("s")]);
    stack.stop().await;
    assert_eq!(engine.calls(), [open("s"), close("s")]);
}

#[tokio::test]
async fn session_control_of_trusted_clients_opens_and_closes() {
    let body = |control: &str| {
        format!(r#"{{"model": "m", "prompt": "x", "nvext": {{"session_control": {control}}}}}"#)
    };
    let begins = body(r#"{"session_id": "s", "action": "open", "timeout": 90}"#);
    let ends = body(r#"{"session_id": "s", "action": "close"}"#);
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let stack = SessionStack::start(&engine, "", "requests: {clients: {trusted: true}}\n").await;
    stack.send(&[], &begins).await.unwrap();
    let expected_options =
        json!({ "capacity_of_str_len": 65_536, "session_id": "s", "timeout": 90.0 });
    assert_eq!(
        engine.calls(),
        [("open_session".to_owned(), expected_options)]
    );
    stack.send(&[], &ends).await.unwrap();
    assert_eq!(engine.received_calls(2).await[1], close("s"));
    stack.stop().await;
    // `nvext` of untrusted clients is ignored.
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let stack = SessionStack::start(&engine, "", "").await;
    stack.send(&[], &begins).await.unwrap();
    stack.stop().await;
    assert_eq!(engine.calls(), []);
}
