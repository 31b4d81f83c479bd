//! The Envoy configurations we ship, run by a real Envoy: what they let through, what they refuse, and what they do
//! when warmroute is away. warmroute itself takes no part here; where its answers matter, a few lines of ext_proc
//! give the plainest ones.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::{Json, Router};
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use parking_lot::Mutex;
use proto::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use proto::processing_request::Request as Message;
use proto::processing_response::Response as Reply;
use serde_json::json;
use support::child::Child;
use support::envoy::{self, Standalone};
use support::ports::{FreePort, until};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use warmroute::ext_proc::contract::Contract;
use warmroute::ext_proc::headers::{AnsweredBy, ResponseHead};

const SOON: Duration = Duration::from_secs(20);
const MB: usize = 1_000_000;

/// An HTTP server that answers with what it was sent, and at `/v1/held` with an answer that ends when it is told to.
struct Worker {
    endpoint: SocketAddr,
    end_held: Arc<Notify>,
    task: AbortHandle,
}

impl Worker {
    async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let endpoint = listener.local_addr().unwrap();
        let answer = async move |request: Request| {
            let (head, body) = request.into_parts();
            let text = |(name, value): (_, &axum::http::HeaderValue)| {
                (name, json!(value.to_str().unwrap()))
            };
            let headers: serde_json::Map<_, _> = head
                .headers
                .iter()
                .map(|(name, value)| text((name.as_str().to_owned(), value)))
                .collect();
            let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
            Json(json!({"endpoint": endpoint.to_string(), "headers": headers, "bytes": body.len()}))
        };
        let end_held = Arc::new(Notify::new());
        let end = Arc::clone(&end_held);
        let held = async move || {
            let tokens = tokio_stream::iter([Ok::<_, std::convert::Infallible>("first")]);
            let rest = futures_util::stream::once(async move {
                end.notified().await;
                Ok("last")
            });
            Body::from_stream(tokens.chain(rest))
        };
        let app = Router::new()
            .route("/v1/held", axum::routing::post(held))
            .fallback(answer);
        let task =
            tokio::spawn(async move { axum::serve(listener, app).await.unwrap() }).abort_handle();
        Self {
            endpoint,
            end_held,
            task,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An ext_proc server that lets everything pass and names the same endpoint for every request.
#[derive(Clone)]
struct OneEndpoint {
    endpoint: SocketAddr,
    seen: Arc<Mutex<Vec<&'static str>>>,
    /// The heads of the responses, as warmroute reads them.
    heads: Arc<Mutex<Vec<ResponseHead>>>,
    /// The bodies of further tries.
    tries: Arc<Mutex<Vec<usize>>>,
    /// Whether streams of the filter for further tries fail.
    fails_tries: bool,
}

impl OneEndpoint {
    /// Serves at the socket until the test's runtime ends.
    fn start(endpoint: SocketAddr, socket: &Path) -> Self {
        Self::start_with(endpoint, socket, false)
    }

    fn start_with(endpoint: SocketAddr, socket: &Path, fails_tries: bool) -> Self {
        let server = Self {
            endpoint,
            seen: Arc::default(),
            heads: Arc::default(),
            tries: Arc::default(),
            fails_tries,
        };
        let service =
            ExternalProcessorServer::new(server.clone()).max_decoding_message_size(33 << 20);
        let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        tokio::spawn(tonic::transport::Server::builder().serve_with_incoming(service, incoming));
        server
    }

    fn answer(&self, request: &proto::ProcessingRequest) -> Option<proto::ProcessingResponse> {
        let message = request.request.as_ref()?;
        if let Message::ResponseHeaders(headers) = message {
            self.heads.lock().push(ResponseHead::read(
                headers.headers.as_ref(),
                &request.attributes,
            ));
        }
        let (name, reply) = match message {
            Message::RequestHeaders(_) => {
                ("request headers", Reply::RequestHeaders(Default::default()))
            }
            Message::RequestBody(_) => ("request body", Reply::RequestBody(Default::default())),
            Message::ResponseHeaders(_) => (
                "response headers",
                Reply::ResponseHeaders(Default::default()),
            ),
            Message::ResponseBody(_) => ("response body", Reply::ResponseBody(Default::default())),
            Message::RequestTrailers(_) => (
                "request trailers",
                Reply::RequestTrailers(Default::default()),
            ),
            Message::ResponseTrailers(_) => (
                "response trailers",
                Reply::ResponseTrailers(Default::default()),
            ),
        };
        self.seen.lock().push(name);
        // As warmroute does it.
        let text = |text: String| Value {
            kind: Some(Kind::StringValue(text)),
        };
        let namespace = |fields: Vec<(&str, String)>| {
            let fields = fields
                .into_iter()
                .map(|(key, value)| (key.to_owned(), text(value)))
                .collect();
            Value {
                kind: Some(Kind::StructValue(Struct { fields })),
            }
        };
        let dynamic_metadata = matches!(message, Message::RequestBody(_)).then(|| {
            let lb = vec![
                ("x-gateway-destination-endpoint", self.endpoint.to_string()),
                ("worker_id", "1".to_owned()),
            ];
            let ours = vec![("exchange", "the-only-one".to_owned())];
            Struct {
                fields: [
                    ("envoy.lb".to_owned(), namespace(lb)),
                    ("warmroute".to_owned(), namespace(ours)),
                ]
                .into(),
            }
        });
        Some(proto::ProcessingResponse {
            response: Some(reply),
            dynamic_metadata,
            ..Default::default()
        })
    }

    /// Lets a further try pass as it is, and notes it.
    fn answer_try(
        &self,
        request: &proto::ProcessingRequest,
    ) -> Result<proto::ProcessingResponse, tonic::Status> {
        if self.fails_tries {
            return Err(tonic::Status::unavailable("as if nobody were there"));
        }
        let reply = match request.request.as_ref() {
            Some(Message::RequestBody(body)) => {
                let named = request
                    .metadata_context
                    .as_ref()
                    .and_then(|told| told.filter_metadata.get("warmroute"));
                assert!(
                    named.is_some_and(|named| named.fields.contains_key("exchange")),
                    "{request:?}"
                );
                self.tries.lock().push(body.body.len());
                Reply::RequestBody(Default::default())
            }
            _ => Reply::RequestHeaders(Default::default()),
        };
        Ok(proto::ProcessingResponse {
            response: Some(reply),
            ..Default::default()
        })
    }
}

/// Notes the end of an exchange, whichever way it comes.
struct Exchange(OneEndpoint);

impl Drop for Exchange {
    fn drop(&mut self) {
        self.0.seen.lock().push("end");
    }
}

#[tonic::async_trait]
impl ExternalProcessor for OneEndpoint {
    type ProcessStream = std::pin::Pin<
        Box<dyn Stream<Item = Result<proto::ProcessingResponse, tonic::Status>> + Send>,
    >;

    async fn process(
        &self,
        request: tonic::Request<tonic::Streaming<proto::ProcessingRequest>>,
    ) -> Result<tonic::Response<Self::ProcessStream>, tonic::Status> {
        // The filter that looks for first tokens is answered, and is no exchange of its own.
        let filter = request.metadata().get("x-warmroute-filter").cloned();
        if filter.as_ref().is_some_and(|filter| filter == "retry") {
            let server = self.clone();
            let replies = request
                .into_inner()
                .map_while(move |message| Some(server.answer_try(&message.ok()?)));
            return Ok(tonic::Response::new(Box::pin(replies)));
        }
        let probe = filter.is_some_and(|filter| filter == "probe");
        let recorder = if probe {
            Self {
                seen: Arc::default(),
                ..self.clone()
            }
        } else {
            self.clone()
        };
        let exchange = Exchange(recorder);
        // An error is one of the ways in which the stream of an ordinary exchange ends.
        let replies = request
            .into_inner()
            .map_while(move |message| Some(Ok(exchange.0.answer(&message.ok()?)?)));
        Ok(tonic::Response::new(Box::pin(replies)))
    }
}

/// An Envoy with the shipped standalone configuration and a directory of its own.
struct Gateway {
    // Dropped first: Envoy must be gone before its directory.
    envoy: Child,
    dir: tempfile::TempDir,
    port: u16,
    admin_port: u16,
}

impl Gateway {
    async fn start(endpoints: &[SocketAddr]) -> Self {
        Self::start_with(endpoints, |shipped| shipped).await
    }

    /// Gives ext_proc more than its second, which a busy machine does not always meet: then Envoy rightly goes on
    /// without it, and a test of what ext_proc is told or says would fail.
    async fn start_patient(endpoints: &[SocketAddr]) -> Self {
        Self::start_with(endpoints, |shipped| {
            assert_eq!(shipped.matches(" message_timeout: 1s").count(), 1);
            shipped.replace(" message_timeout: 1s", " message_timeout: 20s")
        })
        .await
    }

    async fn start_with(endpoints: &[SocketAddr], change: impl FnOnce(String) -> String) -> Self {
        Self::start_file(
            "standalone",
            |file| envoy::write_endpoints(file, endpoints).unwrap(),
            change,
        )
        .await
    }

    /// The file for prefill and decode, with decode workers and one more that prefills; patient as above.
    async fn start_disaggregated(file: &str, decode: &[SocketAddr], prefill: SocketAddr) -> Self {
        let endpoint = |(at, role): (&SocketAddr, &str)| {
            let address = json!({"socket_address": {"address": at.ip(), "port_value": at.port()}});
            let labels = json!({"filter_metadata": {"envoy.lb": {"role": role, "worker_id": at.port().to_string()}}});
            json!({"endpoint": {"address": address}, "metadata": labels})
        };
        let all = decode
            .iter()
            .map(|at| (at, "decode"))
            .chain([(&prefill, "prefill")]);
        let resources = json!({"resources": [{
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "workers",
            "endpoints": [{"lb_endpoints": all.map(endpoint).collect::<Vec<_>>()}],
        }]});
        let patient = |shipped: String| {
            assert_eq!(shipped.matches(" message_timeout: 1s").count(), 1);
            shipped.replace(" message_timeout: 1s", " message_timeout: 20s")
        };
        Self::start_file(
            file,
            |file| fs::write(file, resources.to_string()).unwrap(),
            patient,
        )
        .await
    }

    async fn start_file(
        file: &str,
        list: impl FnOnce(&Path),
        change: impl FnOnce(String) -> String,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (port, admin_port) = (FreePort::find().unwrap(), FreePort::find().unwrap());
        let (port, admin_port) = (port.release(), admin_port.release());
        let place = Standalone {
            run_dir: dir.path(),
            port,
            admin_port,
        };
        list(&place.endpoint_file());
        let envoy = envoy::start(&change(place.config_of(file, &[]).unwrap()), dir.path(), 1)
            .await
            .unwrap();
        Self {
            envoy,
            dir,
            port,
            admin_port,
        }
    }

    fn place(&self) -> Standalone<'_> {
        Standalone {
            run_dir: self.dir.path(),
            port: self.port,
            admin_port: self.admin_port,
        }
    }

    fn post(&self, path: &str, bytes: usize) -> reqwest::RequestBuilder {
        client()
            .post(self.place().url(path))
            .body(vec![b'a'; bytes])
    }

    /// The worker that answered and the status; connections are not reused, so each request is routed on its own.
    async fn served_by(&self) -> (u16, Option<String>) {
        let answer = self.post("/v1/completions", 100).send().await.unwrap();
        let status = answer.status().as_u16();
        let body: Option<serde_json::Value> = answer.json().await.ok();
        (
            status,
            body.map(|body| body["endpoint"].as_str().unwrap().to_owned()),
        )
    }
}

fn client() -> reqwest::Client {
    warmroute::tls::client().timeout(SOON).build().unwrap()
}

async fn echo(request: reqwest::RequestBuilder) -> serde_json::Value {
    let answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.json().await.unwrap()
}

fn process_exists(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::test_kill_process(pid).is_ok()
}

#[test]
fn envoy_accepts_every_shipped_configuration_as_it_is() {
    let _endpoints = ShippedEndpointFile::ensure();
    let files = envoy::shipped().unwrap();
    assert!(!files.is_empty());
    for file in files {
        envoy::validate(&file).unwrap();
    }
}

/// Answers pass the filters from the last to the first. A probe behind the other filter loses whole bodies.
#[test]
fn the_filter_for_the_first_token_stands_first_wherever_there_is_one() {
    let mut probes = 0;
    for file in envoy::shipped().unwrap() {
        let config: serde_json::Value =
            serde_saphyr::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let filters =
            "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
        let filters = config.pointer(filters).unwrap().as_array().unwrap().iter();
        let metadata = |filter: &serde_json::Value| {
            filter["typed_config"]["grpc_service"]["initial_metadata"].clone()
        };
        let told = |filter| metadata(filter)[0]["value"].as_str().map(str::to_owned);
        let told: Vec<_> = filters.map(told).collect();
        let probe = Some("probe".to_owned());
        match told
            .iter()
            .position(|filter| *filter == Some("probed".to_owned()))
        {
            None => assert!(!told.contains(&probe), "{}", file.display()),
            Some(probed) => {
                assert_eq!(
                    (told.iter().position(|filter| *filter == probe), probed),
                    (Some(0), 1),
                    "{}",
                    file.display()
                );
                probes += 1;
            }
        }
    }
    assert!(probes >= 3);
}

/// The file that the shipped configurations name, which Envoy wants to see: made if it is missing, and then removed.
struct ShippedEndpointFile {
    made: bool,
    // Its place is one for all processes, so that one must not remove what another relies on.
    _lock: fs::File,
}

impl ShippedEndpointFile {
    const PATH: &'static str = "/tmp/warmroute/eds_workers.yaml";

    fn ensure() -> Self {
        let lock = fs::File::create("/tmp/warmroute-shipped-endpoint-file.lock").unwrap();
        lock.lock().unwrap();
        let path = Path::new(Self::PATH);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        Self {
            made: fs::File::create_new(path).is_ok(),
            _lock: lock,
        }
    }
}

impl Drop for ShippedEndpointFile {
    fn drop(&mut self) {
        if self.made {
            _ = fs::remove_file(Self::PATH);
            _ = fs::remove_dir(Path::new(Self::PATH).parent().unwrap());
        }
    }
}

#[test]
fn envoy_refuses_a_configuration_with_a_wrong_word() {
    let dir = tempfile::tempdir().unwrap();
    let place = Standalone {
        run_dir: dir.path(),
        port: 10_000,
        admin_port: 9_900,
    };
    envoy::write_endpoints(&place.endpoint_file(), &[]).unwrap();
    let config = place.config().unwrap();
    let file = dir.path().join("envoy.yaml");
    fs::write(&file, &config).unwrap();
    envoy::validate(&file).unwrap();

    fs::write(
        &file,
        config.replace("failure_mode_allow", "failure_mode_permit"),
    )
    .unwrap();
    let refusal = envoy::validate(&file).unwrap_err().to_string();
    assert!(refusal.contains("failure_mode_permit"), "{refusal}");
}

#[test]
fn the_envoy_in_use_tells_its_version() {
    let version = envoy::version(&envoy::binary().unwrap()).unwrap();
    let parts: Vec<u32> = version
        .split('.')
        .map(|part| part.parse().unwrap())
        .collect();
    assert_eq!(parts.len(), 3, "{version}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_warmroute_requests_are_answered_all_the_same() {
    let worker = Worker::start().await;
    let gateway = Gateway::start(&[worker.endpoint]).await;
    for (path, bytes) in [
        ("/v1/chat/completions", 1_000),
        ("/v1/completions", 10 * MB),
        ("/health", 0),
    ] {
        let seen = echo(gateway.post(path, bytes)).await;
        assert_eq!(seen["bytes"], bytes, "{path}");
    }
    let stats = client()
        .get(
            gateway
                .place()
                .admin_url("/stats?filter=failure_mode_allowed"),
        )
        .send()
        .await
        .unwrap();
    let stats = stats.text().await.unwrap();
    assert!(
        stats.contains("http.ingress.ext_proc.failure_mode_allowed: 2"),
        "{stats}"
    );
}

/// An address where nobody listens.
async fn nobody() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap()
        .local_addr()
        .unwrap()
}

const DISAGGREGATED: [&str; 2] = ["disaggregated-call", "disaggregated-mirror"];

/// By some of an engine's paths a client could name, take or end what is another's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_kv_is_handed_over_only_listed_paths_of_engines_are_reached() {
    for file in DISAGGREGATED {
        let (decode, prefill) = (Worker::start().await, Worker::start().await);
        let gateway =
            Gateway::start_disaggregated(file, &[decode.endpoint], prefill.endpoint).await;
        for path in [
            "/abort_request",
            "/flush_cache",
            "/sleep",
            "/reset_prefix_cache",
            "/inference/v1/generate",
            "/v1/chat/completions/batch",
            "/v1/chat/completions/",
            "/v1/%63hat/completions/batch",
            "/v1/load_lora_adapter",
            "/",
        ] {
            let status = gateway
                .post(path, 10)
                .send()
                .await
                .unwrap()
                .status()
                .as_u16();
            assert_eq!(status, 404, "{file} {path}");
        }
        // That is SGLang's own.
        let generate = gateway
            .post("/generate", 10)
            .send()
            .await
            .unwrap()
            .status()
            .as_u16();
        assert_eq!(
            generate,
            if file == "disaggregated-mirror" {
                503
            } else {
                404
            }
        );
        for path in ["/health", "/metrics", "/v1/models?x=1"] {
            assert_eq!(
                echo(gateway.post(path, 0)).await["endpoint"],
                decode.endpoint.to_string(),
                "{file} {path}"
            );
        }
    }
}

/// A decode worker of vLLM's computes the prompt as well; SGLang's would refuse what has no room with 400.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_warmroute_decode_workers_get_what_they_can_do_alone_and_else_it_is_503() {
    let (decode, prefill) = (Worker::start().await, Worker::start().await);
    // Half of the tries meet somebody dead, and the next one is made though nobody is there to be asked.
    let dead = nobody().await;
    let gateway = Gateway::start_disaggregated(
        "disaggregated-call",
        &[dead, decode.endpoint],
        prefill.endpoint,
    )
    .await;
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
    ]
    .repeat(4)
    {
        assert_eq!(
            echo(gateway.post(path, 1_000)).await["endpoint"],
            decode.endpoint.to_string(),
            "{path}"
        );
    }
    let gateway =
        Gateway::start_disaggregated("disaggregated-mirror", &[decode.endpoint], prefill.endpoint)
            .await;
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/generate",
        "/v1/embeddings",
    ] {
        assert_eq!(
            gateway.post(path, 1_000).send().await.unwrap().status(),
            503,
            "{path}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_try_but_the_first_is_shown_and_goes_to_another_decode_worker() {
    for file in DISAGGREGATED {
        let (decode, prefill, dead) =
            (Worker::start().await, Worker::start().await, nobody().await);
        let gateway =
            Gateway::start_disaggregated(file, &[dead, decode.endpoint], prefill.endpoint).await;
        let server = OneEndpoint::start(dead, &gateway.place().ext_proc_socket());
        for bytes in [100, MB, 10 * MB] {
            let seen = echo(gateway.post("/v1/completions", bytes)).await;
            assert_eq!(
                (&seen["endpoint"], &seen["bytes"]),
                (&json!(decode.endpoint.to_string()), &json!(bytes)),
                "{file}"
            );
            assert_eq!(std::mem::take(&mut *server.tries.lock()), [bytes], "{file}");
        }
    }
    // The first one is not.
    for file in DISAGGREGATED {
        let (decode, prefill) = (Worker::start().await, Worker::start().await);
        let gateway =
            Gateway::start_disaggregated(file, &[decode.endpoint], prefill.endpoint).await;
        let server = OneEndpoint::start(decode.endpoint, &gateway.place().ext_proc_socket());
        echo(gateway.post("/v1/completions", 100)).await;
        assert_eq!(*server.tries.lock(), [0; 0], "{file}");
    }
}

/// What the first was handed may be another request's by now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_further_try_that_cannot_be_shown_reaches_no_worker() {
    let (decode, prefill, dead) = (Worker::start().await, Worker::start().await, nobody().await);
    let gateway = Gateway::start_disaggregated(
        "disaggregated-call",
        &[dead, decode.endpoint],
        prefill.endpoint,
    )
    .await;
    let _server = OneEndpoint::start_with(dead, &gateway.place().ext_proc_socket(), true);
    let refused = gateway.post("/v1/completions", 100).send().await.unwrap();
    assert!(refused.status().is_server_error(), "{refused:?}");
    let stats = client()
        .get(gateway.place().admin_url("/clusters"))
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let reached = format!("workers::{}::rq_success::0", decode.endpoint);
    assert!(stats.contains(&reached), "{stats}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routing_headers_of_a_client_never_reach_a_worker() {
    let worker = Worker::start().await;
    let gateway = Gateway::start(&[worker.endpoint]).await;
    for path in ["/v1/completions", "/health"] {
        let mut request = gateway
            .post(path, 10)
            .header("x-tenant-id", "kept")
            .header("x-dynamo-session-id", "kept");
        for name in Contract::default().reserved() {
            request = request.header(name, "1");
        }
        let seen = echo(request).await;
        for name in Contract::default().reserved() {
            assert!(seen["headers"][name].is_null(), "{path} {name}");
        }
        assert_eq!(seen["headers"]["x-tenant-id"], "kept");
        assert_eq!(seen["headers"]["x-dynamo-session-id"], "kept");
        assert_eq!(seen["headers"]["x-envoy-attempt-count"], "1");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_file_renamed_into_place_is_noticed() {
    let (first, second) = (Worker::start().await, Worker::start().await);
    let gateway = Gateway::start(&[]).await;
    let file = gateway.place().endpoint_file();
    assert_eq!(gateway.served_by().await, (503, None));
    for worker in [&first, &second, &first] {
        envoy::write_endpoints(&file, &[worker.endpoint]).unwrap();
        let wanted = (200, Some(worker.endpoint.to_string()));
        assert!(
            until(SOON, async || gateway.served_by().await == wanted).await,
            "{wanted:?}"
        );
    }
    envoy::write_endpoints(&file, &[]).unwrap();
    assert!(until(SOON, async || gateway.served_by().await.0 == 503).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_endpoint_named_in_metadata_gets_every_request() {
    let workers = [
        Worker::start().await,
        Worker::start().await,
        Worker::start().await,
    ];
    let endpoints = workers.each_ref().map(|worker| worker.endpoint);
    let gateway = Gateway::start_patient(&endpoints).await;
    let server = OneEndpoint::start(endpoints[1], &gateway.place().ext_proc_socket());
    for _ in 0..20 {
        assert_eq!(
            gateway.served_by().await,
            (200, Some(endpoints[1].to_string()))
        );
    }
    assert_eq!(
        server
            .seen
            .lock()
            .iter()
            .filter(|name| **name == "request body")
            .count(),
        20
    );
}

/// A worker that reads a request and closes the connection without an answer.
async fn start_mute() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let endpoint = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut some = [0; 1];
            connection.read_exact(&mut some).await.ok();
        }
    });
    endpoint
}

/// A worker that refuses everything with 503.
async fn start_refusing() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let endpoint = listener.local_addr().unwrap();
    let app = Router::new().fallback(async || axum::http::StatusCode::SERVICE_UNAVAILABLE);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    endpoint
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warmroute_is_told_who_answered() {
    let worker = Worker::start().await;
    let (mute, refusing) = (start_mute().await, start_refusing().await);
    let dead = SocketAddr::from((Ipv4Addr::LOCALHOST, FreePort::find().unwrap().release()));
    let alive = worker.endpoint;
    for (what, endpoints, status, by) in [
        (
            "the worker that was chosen",
            vec![alive],
            200,
            AnsweredBy::Worker(alive),
        ),
        (
            "another, because the chosen one is dead",
            vec![dead, alive],
            200,
            AnsweredBy::Worker(alive),
        ),
        (
            "Envoy, because the only one is dead",
            vec![dead],
            503,
            AnsweredBy::Envoy,
        ),
        (
            "Envoy, because the chosen one died meanwhile",
            vec![mute],
            503,
            AnsweredBy::Envoy,
        ),
        (
            "Envoy, because there is nobody",
            vec![],
            503,
            AnsweredBy::Envoy,
        ),
        (
            "the chosen one, and be it with an error",
            vec![refusing],
            503,
            AnsweredBy::Worker(refusing),
        ),
    ] {
        // As shipped, and where the operator has errors tried again: a worker may answer after the last try too.
        for retry_on in ["connect-failure", "5xx,connect-failure"] {
            let patient = |shipped: String| {
                let patient = shipped.replace(" message_timeout: 1s", " message_timeout: 20s");
                patient.replace(
                    "retry_on: connect-failure",
                    &format!("retry_on: {retry_on}"),
                )
            };
            let gateway = Gateway::start_with(&endpoints, patient).await;
            let chosen = endpoints.first().copied().unwrap_or(dead);
            let server = OneEndpoint::start(chosen, &gateway.place().ext_proc_socket());
            assert_eq!(
                gateway
                    .post("/v1/completions", 100)
                    .send()
                    .await
                    .unwrap()
                    .status(),
                status,
                "{what}"
            );
            let head = server.heads.lock().pop().unwrap();
            assert_eq!(
                (head.status, head.from),
                (status, by),
                "{what}, retry on {retry_on}"
            );
        }
    }
}

/// What frees the load of a worker: the end of the exchange must not come early, and must come when the client leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_ends_with_its_response_or_its_client() {
    const WITH_BODY: &[&str] = &["request headers", "request body", "response headers", "end"];
    const WITHOUT: &[&str] = &["request headers", "response headers", "end"];
    let worker = Worker::start().await;
    let gateway = Gateway::start_patient(&[worker.endpoint]).await;
    let server = OneEndpoint::start(worker.endpoint, &gateway.place().ext_proc_socket());
    let seen = async |wanted: &[&str]| until(SOON, async || *server.seen.lock() == wanted).await;
    for (bytes, whole, client_leaves) in [
        (100, WITH_BODY, false),
        (100, WITH_BODY, true),
        (0, WITHOUT, false),
        (0, WITHOUT, true),
    ] {
        server.seen.lock().clear();
        let mut response = gateway.post("/v1/held", bytes).send().await.unwrap();
        assert_eq!(response.chunk().await.unwrap().unwrap(), "first");
        assert!(
            seen(&whole[..whole.len() - 1]).await,
            "{:?}",
            server.seen.lock()
        );
        // Long enough for an end that comes with the response headers to be seen; it does so within a millisecond.
        assert!(
            !until(Duration::from_millis(200), async || server
                .seen
                .lock()
                .contains(&"end"))
            .await
        );
        if client_leaves {
            drop(response);
        } else {
            worker.end_held.notify_one();
            assert_eq!(response.text().await.unwrap(), "last");
        }
        assert!(seen(whole).await, "{:?}", server.seen.lock());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_up_to_32_mib_pass_and_larger_ones_are_refused() {
    let worker = Worker::start().await;
    let gateway = Gateway::start_patient(&[worker.endpoint]).await;
    let server = OneEndpoint::start(worker.endpoint, &gateway.place().ext_proc_socket());
    for bytes in [10 * MB, 32 * MB] {
        assert_eq!(
            echo(gateway.post("/v1/completions", bytes)).await["bytes"],
            bytes
        );
    }
    let refused = gateway
        .post("/v1/completions", 40 * MB)
        .send()
        .await
        .unwrap();
    assert_eq!(refused.status(), 413);
    assert_eq!(
        server
            .seen
            .lock()
            .iter()
            .filter(|name| **name == "request body")
            .count(),
        2
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_is_gone_when_its_owner_is_dropped_even_if_it_was_stopped() {
    let gateway = Gateway::start(&[]).await;
    let pid = gateway.envoy.pid();
    assert!(gateway.envoy.is_running() && process_exists(pid));
    gateway.envoy.freeze();
    drop(gateway);
    assert!(!process_exists(pid));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envoy_that_cannot_start_is_reported_with_its_own_words() {
    let dir = tempfile::tempdir().unwrap();
    let error = envoy::start("static_resources: {nonsense: 1}", dir.path(), 1)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("envoy has ended before it was ready") && error.contains("nonsense"),
        "{error}"
    );
}

#[test]
fn a_child_that_ignores_polite_requests_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"]);
    let child = Child::spawn("deaf", &command, dir.path()).unwrap();
    let deadline = Instant::now() + SOON;
    while child.log_tail() != "deaf" && Instant::now() < deadline {
        std::thread::yield_now();
    }
    child.terminate();
    assert_eq!(
        child.wait_exit(Instant::now() + Duration::from_millis(200)),
        None
    );
    let pid = child.pid();
    drop(child);
    assert!(!process_exists(pid));
}

/// Not a test of its own: the parent that the next one kills. Does nothing unless it is told where to report.
#[test]
#[ignore = "run by children_end_with_a_parent_that_is_killed"]
fn a_parent_waiting_to_be_killed() {
    #[expect(
        clippy::disallowed_methods,
        reason = "libtest takes no arguments for a test"
    )]
    let Some(dir) = std::env::var_os("PARENT_RUN_DIR") else {
        return;
    };
    let mut command = std::process::Command::new("sleep");
    let child = Child::spawn("grandchild", command.arg("600"), Path::new(&dir)).unwrap();
    fs::write(Path::new(&dir).join("new"), child.pid().to_string()).unwrap();
    fs::rename(Path::new(&dir).join("new"), Path::new(&dir).join("pid")).unwrap();
    child.wait_exit(Instant::now() + Duration::from_secs(60));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn children_end_with_a_parent_that_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "a_parent_waiting_to_be_killed", "--ignored"])
        .env("PARENT_RUN_DIR", dir.path());
    let parent = Child::spawn("parent", &command, dir.path()).unwrap();
    let file = dir.path().join("pid");
    assert!(
        until(SOON, async || file.exists()).await,
        "{}",
        parent.log_tail()
    );
    let grandchild: u32 = fs::read_to_string(&file).unwrap().parse().unwrap();
    assert!(process_exists(grandchild));
    parent.kill9();
    // Its new parent may take a moment to reap it.
    let is_dead = async || {
        let stat = fs::read_to_string(format!("/proc/{grandchild}/stat"));
        !stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    assert!(until(SOON, is_dead).await);
}
