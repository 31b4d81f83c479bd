//! Exchanges with an ext_proc server that selects one endpoint.

use super::*;

/// ext_proc server that changes nothing and selects the same endpoint for every request.
#[derive(Clone)]
pub(super) struct OneEndpoint {
    endpoint: SocketAddr,
    /// Number of request bodies, without retries.
    pub(super) bodies: Arc<Mutex<usize>>,
    /// Parsed heads of the responses.
    heads: Arc<Mutex<Vec<ResponseHead>>>,
    /// Body sizes of retries.
    pub(super) retries: Arc<Mutex<Vec<usize>>>,
    /// True if streams of the retry filter fail.
    fails_retries: bool,
}

impl OneEndpoint {
    /// Serves on the socket until the runtime of the test ends.
    pub(super) fn start(endpoint: SocketAddr, socket: &Path) -> Self {
        Self::start_with(endpoint, socket, false)
    }

    pub(super) fn start_with(endpoint: SocketAddr, socket: &Path, fails_retries: bool) -> Self {
        let server = Self {
            endpoint,
            bodies: Arc::default(),
            heads: Arc::default(),
            retries: Arc::default(),
            fails_retries,
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
            self.heads.lock().push(ResponseHead::parse(
                headers.headers.as_ref(),
                &request.attributes,
            ));
        }
        let reply = match message {
            Message::RequestHeaders(_) => Reply::RequestHeaders(Default::default()),
            Message::RequestBody(_) => {
                *self.bodies.lock() += 1;
                Reply::RequestBody(Default::default())
            }
            Message::ResponseHeaders(_) => Reply::ResponseHeaders(Default::default()),
            Message::ResponseBody(_) => Reply::ResponseBody(Default::default()),
            Message::RequestTrailers(_) => Reply::RequestTrailers(Default::default()),
            Message::ResponseTrailers(_) => Reply::ResponseTrailers(Default::default()),
        };
        // The same dynamic metadata as from warmroute.
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

    /// Records the body size of a retry and passes the retry unchanged.
    fn answer_retry(
        &self,
        request: &proto::ProcessingRequest,
    ) -> Result<proto::ProcessingResponse, tonic::Status> {
        if self.fails_retries {
            return Err(tonic::Status::unavailable(
                "the retry filter is unavailable",
            ));
        }
        let reply = match request.request.as_ref() {
            Some(Message::RequestBody(body)) => {
                let metadata = request
                    .metadata_context
                    .as_ref()
                    .and_then(|context| context.filter_metadata.get("warmroute"));
                assert!(
                    metadata.is_some_and(|metadata| metadata.fields.contains_key("exchange")),
                    "{request:?}"
                );
                self.retries.lock().push(body.body.len());
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

#[tonic::async_trait]
impl ExternalProcessor for OneEndpoint {
    type ProcessStream = std::pin::Pin<
        Box<dyn Stream<Item = Result<proto::ProcessingResponse, tonic::Status>> + Send>,
    >;

    async fn process(
        &self,
        request: tonic::Request<tonic::Streaming<proto::ProcessingRequest>>,
    ) -> Result<tonic::Response<Self::ProcessStream>, tonic::Status> {
        let server = self.clone();
        let filter = request.metadata().get("x-warmroute-filter");
        if filter.is_some_and(|filter| filter == "retry") {
            let replies = request
                .into_inner()
                .map_while(move |message| Some(server.answer_retry(&message.ok()?)));
            return Ok(tonic::Response::new(Box::pin(replies)));
        }
        // The client may end the stream of a normal exchange with an error.
        let replies = request
            .into_inner()
            .map_while(move |message| Some(Ok(server.answer(&message.ok()?)?)));
        Ok(tonic::Response::new(Box::pin(replies)))
    }
}

/// Starts a worker that closes each connection without a response.
async fn start_closing() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let endpoint = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let mut byte = [0; 1];
            connection.read_exact(&mut byte).await.ok();
        }
    });
    endpoint
}

/// Starts a worker that rejects every request with 503.
async fn start_rejecting() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let endpoint = listener.local_addr().unwrap();
    let app = Router::new().fallback(async || axum::http::StatusCode::SERVICE_UNAVAILABLE);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    endpoint
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn response_head_identifies_its_source() {
    let worker = RecordingWorker::start().await;
    let closing = start_closing().await;
    let rejecting = start_rejecting().await;
    let dead = SocketAddr::from((Ipv4Addr::LOCALHOST, FreePort::find().unwrap().release()));
    let alive = worker.address;
    let envoy = ResponseSource::Envoy;
    let worker = ResponseSource::Worker;
    for (case, endpoints, status, source) in [
        ("chosen worker", vec![alive], 200, worker(alive)),
        (
            "another worker: the chosen one is dead",
            vec![dead, alive],
            200,
            worker(alive),
        ),
        ("Envoy: the only worker is dead", vec![dead], 503, envoy),
        (
            "Envoy: the chosen worker closes the connection",
            vec![closing],
            503,
            envoy,
        ),
        ("Envoy: the cluster is empty", vec![], 503, envoy),
        (
            "chosen worker, with an error",
            vec![rejecting],
            503,
            worker(rejecting),
        ),
    ] {
        // The second value makes Envoy retry 5xx responses, so the response of a worker may be that
        // of the last attempt.
        for retry_on in ["connect-failure", "5xx,connect-failure"] {
            let gateway = EnvoyGateway::start_with(&endpoints, |config| {
                let retried = format!("retry_on: {retry_on}");
                config.replace("retry_on: connect-failure", &retried)
            })
            .await;
            let chosen = endpoints.first().copied().unwrap_or(dead);
            let server = OneEndpoint::start(chosen, &gateway.setup().ext_proc_socket());
            let response = gateway.post("/v1/completions", 100).send().await;
            assert_eq!(response.unwrap().status(), status, "{case}");
            let head = server.heads.lock().pop().unwrap();
            assert_eq!(
                (head.status, head.source),
                (status, source),
                "{case}, retry on {retry_on}"
            );
        }
    }
}
