//! Engine sessions of a whole server.

use serde_json::Value;
use warmroute_testbed::merge_config;

use super::*;
use crate::site::ServerSite;
use crate::support::ext_proc;

/// A started warmroute server in front of one engine.
struct SessionStack {
    client: ExternalProcessorClient<Channel>,
    server: ServerSite,
    /// Number of requests that extended their message timeout because they wait.
    waiting: watch::Sender<usize>,
}

impl SessionStack {
    /// Starts the server with these session settings. `more` is merged into the configuration.
    async fn start(engine: &SessionEngine, sessions: Value, more: &Value) -> Self {
        let mut config = json!({
            "models": [{"name": "m"}],
            "workers": {"list": [{"id": 1, "endpoint": engine.address}]},
            "sessions": {"engine": {"kind": "sglang"}},
        });
        merge_config(&mut config["sessions"]["engine"], &sessions);
        merge_config(&mut config, more);
        let server = ServerSite::start(&config, |_| ()).await;
        Self {
            client: ExternalProcessorClient::new(server.channel().await),
            server,
            waiting: watch::Sender::new(0),
        }
    }

    /// Sends a request in the background. The task ends when the request is routed.
    fn send(&self, session: &[(&str, &str)], body: &str) -> JoinHandle<()> {
        let messages = ext_proc::post("/v1/completions", session, body);
        let mut client = self.client.clone();
        let waiting = self.waiting.clone();
        tokio::spawn(async move {
            // The stream stays open, as Envoy keeps it while the request runs.
            let (sender, receiver) = mpsc::channel(2);
            for message in messages {
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
        self.server.end().await;
    }
}

const BODY: &str = r#"{"model": "m", "prompt": "x"}"#;

#[tokio::test]
async fn server_opens_session_and_closes_it_on_shutdown() {
    let engine = SessionEngine::start(EngineBehaviour::Well).await;
    let stack = SessionStack::start(&engine, json!({}), &json!({})).await;
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
        json!({"timeout": "20s"}),
        &json!({"engines": {"http": {"timeout": "20s"}}}),
    )
    .await;
    let first = stack.send(&[("x-session-id", "s")], BODY);
    engine.received_calls(1).await;
    let second = stack.send(&[("x-session-id", "s")], BODY);
    let mut waiting = stack.waiting.subscribe();
    let both = waiting.wait_for(|count| *count == 2);
    assert!(tokio::time::timeout(PATIENCE, both).await.is_ok());
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
    let stack = SessionStack::start(&engine, json!({"timeout": "300ms"}), &json!({})).await;
    let began = Instant::now();
    tokio::time::timeout(PATIENCE, stack.send(&[("x-session-id", "s")], BODY))
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
        json!({}),
        &json!({"engines": {"http": {"token_file": file}}}),
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
    let stack = SessionStack::start(
        &engine,
        json!({}),
        &json!({"requests": {"clients": {"trusted": true}}}),
    )
    .await;
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
    let stack = SessionStack::start(&engine, json!({}), &json!({})).await;
    stack.send(&[], &begins).await.unwrap();
    stack.stop().await;
    assert_eq!(engine.calls(), []);
}
