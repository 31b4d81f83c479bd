//! A fake Kubernetes API server. It serves list and watch of pods and InferencePools with resource
//! versions, pages, bookmarks and selectors, and API discovery, over TLS with a bearer token. It
//! grants the Role of the conformance fixture: get, list and watch of these two kinds. Everything
//! else is forbidden, including the optional kinds until a test allows them. It rejects unknown
//! query parameters, and injects the faults of real API servers. Further methods change the
//! objects, as a cluster would.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Bearer token that is accepted by default.
pub(crate) const TOKEN: &str = "a-token-of-a-service-account";

/// Interval of bookmarks on an idle watch.
const BOOKMARK: Duration = Duration::from_millis(200);

/// Allowed query parameters. Any other parameter is a client error.
const QUERIES: [&str; 9] = [
    "allowWatchBookmarks",
    "continue",
    "fieldSelector",
    "labelSelector",
    "limit",
    "resourceVersion",
    "resourceVersionMatch",
    "timeoutSeconds",
    "watch",
];

/// The API group of InferencePools.
const POOLS: &str = "inference.networking.k8s.io";

const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// Optional kinds with their API groups. They are forbidden until a test allows them.
pub(crate) const OPTIONAL: [&str; 4] = [
    "inferenceobjectives.llm-d.ai",
    "inferencemodelrewrites.llm-d.ai",
    "inferenceobjectives.inference.networking.x-k8s.io",
    "inferencemodelrewrites.inference.networking.x-k8s.io",
];

/// Change of an object at a resource version.
#[derive(Clone)]
struct ObjectChange {
    version: u64,
    /// `pods`, `inferencepools`, or one of [`OPTIONAL`].
    kind: String,
    before: Option<Value>,
    after: Option<Value>,
}

#[derive(Default)]
struct ClusterState {
    version: u64,
    objects: BTreeMap<(String, String, String), Value>,
    changes: Vec<ObjectChange>,
    /// Version up to which the history has been discarded.
    compacted: u64,
    /// Kinds that clients may neither list nor watch.
    forbidden: BTreeSet<String>,
    /// Kinds whose definition is not installed.
    missing: BTreeSet<String>,
    /// Number of watches so far.
    watches: u64,
    /// Number of the last watch that delivers no events although its connection is open.
    dead: u64,
    /// Forbidden or malformed requests.
    violations: Vec<String>,
    lists: u64,
    /// Number of forbidden requests for each kind of [`OPTIONAL`].
    refused: BTreeMap<String, u64>,
    /// Number of requests for API discovery.
    discoveries: u64,
    /// Kinds that clients may list but not watch.
    unwatched: BTreeSet<String>,
    /// Status and `Retry-After` of all responses, during an outage.
    outage: Option<(u16, u64)>,
    /// True if requests get no response.
    is_frozen: bool,
    requests: u64,
    token: String,
}

/// The fake cluster. Its objects survive [`stop`](Self::stop).
pub(crate) struct ApiServer {
    cluster: Arc<Mutex<ClusterState>>,
    changed: watch::Sender<u64>,
    pub(crate) address: SocketAddr,
    certificate: rcgen::CertifiedKey<rcgen::KeyPair>,
    running: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct SharedCluster {
    cluster: Arc<Mutex<ClusterState>>,
    changed: watch::Sender<u64>,
}

impl ApiServer {
    /// Starts the server with an empty cluster.
    pub(crate) async fn start() -> Self {
        let certificate =
            rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()])
                .unwrap();
        let mut server = Self {
            cluster: Arc::new(Mutex::new(ClusterState {
                forbidden: OPTIONAL.map(str::to_owned).into(),
                token: TOKEN.to_owned(),
                ..ClusterState::default()
            })),
            changed: watch::Sender::default(),
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            certificate,
            running: None,
        };
        server.resume().await;
        server
    }

    /// Stops the server and closes all connections.
    pub(crate) async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
            _ = running.await;
        }
    }

    /// Starts the server again at the same address.
    pub(crate) async fn resume(&mut self) {
        let listener = bind(self.address).await;
        self.address = listener.local_addr().unwrap();
        let key = rustls::pki_types::PrivateKeyDer::try_from(
            self.certificate.signing_key.serialize_der(),
        )
        .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.cert.der().clone()], key)
            .unwrap();
        let shared = SharedCluster {
            cluster: self.cluster.clone(),
            changed: self.changed.clone(),
        };
        let routes = Router::new().fallback(respond).with_state(shared);
        self.running = Some(tokio::spawn(serve(
            listener,
            TlsAcceptor::from(Arc::new(tls)),
            routes,
        )));
    }

    /// Returns the kubeconfig of a client with this token.
    pub(crate) fn kubeconfig(&self, token: &str) -> Value {
        let authority = base64(self.certificate.cert.pem().as_bytes());
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": {
                "server": format!("https://{}", self.address), "certificate-authority-data": authority,
            }}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "inference"}}],
        })
    }

    /// Creates or replaces an object.
    pub(crate) fn put(&self, kind: &str, mut object: Value) {
        let mut cluster = self.cluster.lock();
        cluster.version += 1;
        object["metadata"]["resourceVersion"] = json!(cluster.version.to_string());
        let before = cluster.objects.insert(key(kind, &object), object.clone());
        cluster.log(kind, before, Some(object));
        self.changed.send_replace(cluster.version);
    }

    /// Changes an existing object.
    pub(crate) fn change(&self, kind: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let key = (kind.to_owned(), "inference".to_owned(), name.to_owned());
        let mut object = self.cluster.lock().objects[&key].clone();
        change(&mut object);
        self.put(kind, object);
    }

    pub(crate) fn delete(&self, kind: &str, name: &str) {
        let mut cluster = self.cluster.lock();
        let mut before = cluster
            .objects
            .remove(&(kind.to_owned(), "inference".to_owned(), name.to_owned()))
            .unwrap();
        cluster.version += 1;
        before["metadata"]["resourceVersion"] = json!(cluster.version.to_string());
        cluster.log(kind, Some(before), None);
        self.changed.send_replace(cluster.version);
    }

    /// Discards the history. A watch that resumes from an older version gets 410 and has to list.
    pub(crate) fn compact(&self) {
        let mut cluster = self.cluster.lock();
        // An unrelated change, so that the current version of every client is too old.
        cluster.version += 1;
        cluster.compacted = cluster.version;
        cluster.changes.clear();
    }

    pub(crate) fn forbid(&self, kind: &str, forbidden: bool) {
        let mut cluster = self.cluster.lock();
        if forbidden {
            cluster.forbidden.insert(kind.to_owned())
        } else {
            cluster.forbidden.remove(kind)
        };
    }

    pub(crate) fn uninstall(&self, kind: &str, missing: bool) {
        let mut cluster = self.cluster.lock();
        if missing {
            cluster.missing.insert(kind.to_owned())
        } else {
            cluster.missing.remove(kind)
        };
    }

    /// Makes existing watches deliver no events from now on, as behind a gateway that dropped their
    /// state.
    pub(crate) fn kill_watches(&self) {
        let mut cluster = self.cluster.lock();
        cluster.dead = cluster.watches;
    }

    /// Stops responding to existing watches and new requests. They stay without a response, even
    /// after [`thaw`](Self::thaw).
    pub(crate) fn freeze(&self) {
        self.kill_watches();
        self.cluster.lock().is_frozen = true;
    }

    /// Responds to new requests again.
    pub(crate) fn thaw(&self) {
        self.cluster.lock().is_frozen = false;
    }

    pub(crate) fn authority(&self) -> String {
        self.certificate.cert.pem()
    }

    /// Returns the number of requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.cluster.lock().requests
    }

    /// Returns the number of list requests so far.
    pub(crate) fn lists(&self) -> u64 {
        self.cluster.lock().lists
    }

    /// Returns the number of forbidden requests for a kind of [`OPTIONAL`].
    pub(crate) fn refused(&self, kind: &str) -> u64 {
        self.cluster
            .lock()
            .refused
            .get(kind)
            .copied()
            .unwrap_or_default()
    }

    /// Returns the number of requests for API discovery.
    pub(crate) fn discoveries(&self) -> u64 {
        self.cluster.lock().discoveries
    }

    /// Returns the forbidden or malformed requests.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.cluster.lock().violations.clone()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.abort();
        }
    }
}

impl ClusterState {
    fn log(&mut self, kind: &str, before: Option<Value>, after: Option<Value>) {
        let version = self.version;
        self.changes.push(ObjectChange {
            version,
            kind: kind.to_owned(),
            before,
            after,
        });
    }
}

fn key(kind: &str, object: &Value) -> (String, String, String) {
    let field = |name: &str| object["metadata"][name].as_str().unwrap().to_owned();
    (kind.to_owned(), field("namespace"), field("name"))
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// Binds the address. Retries while a connection of another test uses the port.
async fn bind(address: SocketAddr) -> TcpListener {
    for _ in 0..100 {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                tokio::time::sleep(Duration::from_millis(100)).await
            }
            bound => return bound.unwrap(),
        }
    }
    panic!("{address} stays in use");
}

/// Accepts connections until the future is dropped, which closes them.
async fn serve(listener: TcpListener, tls: TlsAcceptor, routes: Router) {
    let (connections_tx, connections) = mpsc::channel(16);
    let address = listener.local_addr().unwrap();
    let accept = async move {
        let mut handshakes = JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            let tls = tls.clone();
            let connections_tx = connections_tx.clone();
            handshakes.spawn(async move {
                if let Ok(socket) = tls.accept(socket).await {
                    _ = connections_tx.send(socket).await;
                }
            });
        }
    };
    let cut = watch::Sender::new(());
    let listener = CuttingListener {
        connections,
        address,
        cut: cut.clone(),
    };
    tokio::select! {
        () = accept => {}
        _ = axum::serve(listener, routes) => {}
    }
}

struct CuttingListener {
    connections: mpsc::Receiver<TlsStream<TcpStream>>,
    address: SocketAddr,
    cut: watch::Sender<()>,
}

impl axum::serve::Listener for CuttingListener {
    type Io = support::CutStream<TlsStream<TcpStream>>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.connections.recv().await {
            Some(socket) => (
                support::CutStream::new(socket, self.cut.subscribe()),
                self.address,
            ),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// Connections that close with the server. Their tasks are detached, so aborting the server does
/// not end them.
mod support {
    use std::future::Future;
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio::sync::watch;

    pub(crate) struct CutStream<S> {
        socket: S,
        cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    }

    impl<S> CutStream<S> {
        pub(crate) fn new(socket: S, mut alive: watch::Receiver<()>) -> Self {
            let cut = async move { while alive.changed().await.is_ok() {} };
            Self {
                socket,
                cut: Box::pin(cut),
            }
        }
    }

    impl<S: AsyncRead + Unpin> AsyncRead for CutStream<S> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            into: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            match self.cut.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                Poll::Pending => Pin::new(&mut self.socket).poll_read(cx, into),
            }
        }
    }

    impl<S: AsyncWrite + Unpin> AsyncWrite for CutStream<S> {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            from: &[u8],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.socket).poll_write(cx, from)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.socket).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.socket).poll_shutdown(cx)
        }
    }
}

fn failure(code: StatusCode, reason: &str, message: &str) -> Response {
    let status = status(code, reason, message);
    (
        code,
        [(header::CONTENT_TYPE, "application/json")],
        status.to_string(),
    )
        .into_response()
}

fn status(code: StatusCode, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16(),
    })
}

impl ClusterState {
    /// Returns the response to a request that the cluster refuses. As in a real API server, 403
    /// takes precedence over 404.
    fn refusal(&mut self, query: &ListQuery, forbidden: &str) -> Option<Response> {
        let kind = &query.kind;
        if self.forbidden.contains(kind) {
            *self.refused.entry(kind.clone()).or_default() += 1;
            return Some(failure(StatusCode::FORBIDDEN, "Forbidden", forbidden));
        }
        if query.watch && self.unwatched.contains(kind) {
            let text = "pods is forbidden: User \"u\" cannot watch resource";
            return Some(failure(StatusCode::FORBIDDEN, "Forbidden", text));
        }
        let text = "the server could not find the requested resource";
        let is_missing = self.missing.contains(kind);
        is_missing.then(|| failure(StatusCode::NOT_FOUND, "NotFound", text))
    }
}

async fn respond(State(shared): State<SharedCluster>, request: Request) -> Response {
    let (is_frozen, outage, bearer) = {
        let mut cluster = shared.cluster.lock();
        cluster.requests += 1;
        let bearer = format!("Bearer {}", cluster.token);
        (cluster.is_frozen, cluster.outage, bearer)
    };
    if is_frozen {
        return std::future::pending().await;
    }
    if let Some((status, retry_after)) = outage {
        let status = StatusCode::from_u16(status).unwrap();
        return (
            status,
            [(header::RETRY_AFTER, retry_after.to_string())],
            "upstream connect error",
        )
            .into_response();
    }
    let authorization = request.headers().get(header::AUTHORIZATION);
    if authorization.is_none_or(|value| value.as_bytes() != bearer.as_bytes()) {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized");
    }
    let path = request.uri().path();
    let query = request.uri().query().unwrap_or_default();
    if let Some(page) = discovery(path).filter(|_| request.method() == Method::GET) {
        shared.cluster.lock().discoveries += 1;
        return (
            [(header::CONTENT_TYPE, "application/json")],
            page.to_string(),
        )
            .into_response();
    }
    if path == ACCESS_REVIEWS && request.method() == Method::POST {
        return review_access(&shared, request).await;
    }
    let collection = parse_collection(path).filter(|_| request.method() == Method::GET);
    let forbidden = || format!("forbidden: User \"u\" cannot {} {path}", request.method());
    let Some((namespace, kind)) = collection else {
        shared.cluster.lock().violations.push(forbidden());
        return failure(StatusCode::FORBIDDEN, "Forbidden", &forbidden());
    };
    let list_query = match ListQuery::read(&namespace, &kind, query) {
        Ok(list_query) => list_query,
        Err(problem) => {
            shared.cluster.lock().violations.push(problem.clone());
            return failure(StatusCode::BAD_REQUEST, "BadRequest", &problem);
        }
    };
    let refusal = shared.cluster.lock().refusal(&list_query, &forbidden());
    if let Some(response) = refusal {
        return response;
    }
    if list_query.watch {
        watch_response(&shared, list_query)
    } else {
        list_response(&shared, &list_query)
    }
}

/// Returns the access review with the rights of the client to list or watch a kind.
async fn review_access(shared: &SharedCluster, request: Request) -> Response {
    let body = axum::body::to_bytes(request.into_body(), 65_536)
        .await
        .unwrap();
    let mut review: Value = serde_json::from_slice(&body).unwrap();
    let attributes = &review["spec"]["resourceAttributes"];
    let attribute = |key: &str| attributes[key].as_str().unwrap_or_default();
    let kind = match attribute("group") {
        "" | POOLS => attribute("resource").to_owned(),
        group => format!("{}.{group}", attribute("resource")),
    };
    let cluster = shared.cluster.lock();
    let is_allowed = match attribute("verb") {
        "list" => !cluster.forbidden.contains(&kind),
        "watch" => !cluster.forbidden.contains(&kind) && !cluster.unwatched.contains(&kind),
        _ => false,
    };
    review["status"] = json!({"allowed": is_allowed});
    (
        StatusCode::CREATED,
        [(header::CONTENT_TYPE, "application/json")],
        review.to_string(),
    )
        .into_response()
}

/// Parses the path of a collection. Returns namespace and kind.
fn parse_collection(path: &str) -> Option<(String, String)> {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let (namespace, kind) = match parts[..] {
        ["api", "v1", "namespaces", namespace, "pods"] => (namespace, "pods".to_owned()),
        [
            "apis",
            POOLS,
            "v1",
            "namespaces",
            namespace,
            "inferencepools",
        ] => (namespace, "inferencepools".to_owned()),
        ["apis", group, "v1alpha2", "namespaces", namespace, kind] => {
            (namespace, format!("{kind}.{group}"))
        }
        _ => return None,
    };
    let known = ["pods", "inferencepools"].contains(&&*kind) || OPTIONAL.contains(&&*kind);
    known.then(|| (namespace.to_owned(), kind))
}

/// Returns the page of API discovery at a path, which every client with a token may read.
fn discovery(path: &str) -> Option<Value> {
    let resource = |plural: &str, singular: &str, kind: &str| {
        let verbs = ["get", "list", "watch"];
        json!({"name": plural, "singularName": singular, "namespaced": true, "kind": kind, "verbs": verbs})
    };
    let resources = |version: &str, resource: Value| json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": [resource]});
    let version = json!({"groupVersion": format!("{POOLS}/v1"), "version": "v1"});
    let group = json!({"name": POOLS, "versions": [version], "preferredVersion": version});
    Some(match path {
        "/api" => {
            json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
        }
        "/apis" => json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}),
        "/api/v1" => resources("v1", resource("pods", "pod", "Pod")),
        "/apis/inference.networking.k8s.io/v1" => resources(
            &format!("{POOLS}/v1"),
            resource("inferencepools", "inferencepool", "InferencePool"),
        ),
        _ => return None,
    })
}

/// Parses a selector of the form `a=b,c=d`.
fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |pair: &str| {
        pair.split_once('=')
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
    };
    text.split(',')
        .map(|one| pair(one).ok_or_else(|| format!("selector {text:?}")))
        .collect()
}

/// Parameters of a list or watch request.
#[derive(Clone)]
struct ListQuery {
    namespace: String,
    kind: String,
    labels: Vec<(String, String)>,
    name: Option<String>,
    watch: bool,
    bookmarks: bool,
    version: Option<u64>,
    limit: Option<usize>,
    after: Option<String>,
    timeout: Duration,
}

impl ListQuery {
    fn read(namespace: &str, kind: &str, query: &str) -> Result<Self, String> {
        let url = reqwest::Url::parse(&format!("http://x/?{query}"))
            .map_err(|error| error.to_string())?;
        let all: BTreeMap<String, String> = url
            .query_pairs()
            .map(|(key, value)| (key.into_owned(), value.into_owned()))
            .collect();
        if let Some(unknown) = all.keys().find(|key| !QUERIES.contains(&key.as_str())) {
            return Err(format!("unknown parameter {unknown} in {query}"));
        }
        let number = |key: &str| {
            all.get(key)
                .map(|text| {
                    text.parse::<u64>()
                        .map_err(|_| format!("{key} is {text:?}"))
                })
                .transpose()
        };
        let selector = |key: &str| all.get(key).map_or(Ok(Vec::new()), |text| pairs(text));
        let labels = selector("labelSelector")?;
        let fields = selector("fieldSelector")?;
        let name = match &fields[..] {
            [] => None,
            [(field, value)] if field == "metadata.name" => Some(value.clone()),
            other => return Err(format!("field selector {other:?}")),
        };
        if kind == "pods" && labels.is_empty() {
            return Err("pods are listed without a label selector".to_owned());
        }
        let watch = all.get("watch").is_some_and(|text| text == "true");
        let version = number("resourceVersion")?;
        if watch && version.is_none() {
            return Err("a watch without a resource version".to_owned());
        }
        let limit = number("limit")?
            .map(|limit| limit as usize)
            .filter(|limit| *limit > 0);
        let timeout = Duration::from_secs(number("timeoutSeconds")?.unwrap_or(300));
        let bookmarks = all
            .get("allowWatchBookmarks")
            .is_some_and(|text| text == "true");
        Ok(Self {
            namespace: namespace.to_owned(),
            kind: kind.to_owned(),
            labels,
            name,
            watch,
            bookmarks,
            version,
            limit,
            after: all.get("continue").cloned(),
            timeout,
        })
    }

    fn has(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        metadata["namespace"] == *self.namespace
            && self
                .name
                .as_ref()
                .is_none_or(|name| metadata["name"] == **name)
            && self
                .labels
                .iter()
                .all(|(name, value)| metadata["labels"][name] == **value)
    }

    /// Returns the watch event of a change, if the request selects the object.
    fn watch_event(&self, change: &ObjectChange) -> Option<Value> {
        if change.kind != self.kind {
            return None;
        }
        let before = change.before.as_ref().filter(|object| self.has(object));
        let after = change.after.as_ref().filter(|object| self.has(object));
        let (kind, object) = match (before, after) {
            (None, None) => return None,
            (None, Some(object)) => ("ADDED", object.clone()),
            (Some(_), Some(object)) => ("MODIFIED", object.clone()),
            (Some(object), None) => ("DELETED", object.clone()),
        };
        let mut event = json!({"type": kind, "object": object});
        // A deleted object has its last state and the version of the deletion.
        event["object"]["metadata"]["resourceVersion"] = json!(change.version.to_string());
        Some(event)
    }
}

fn list_response(shared: &SharedCluster, list_query: &ListQuery) -> Response {
    let mut cluster = shared.cluster.lock();
    cluster.lists += 1;
    let found = cluster
        .objects
        .iter()
        .filter(|((kind, ..), object)| *kind == list_query.kind && list_query.has(object));
    let rest: Vec<(String, Value)> = found
        .map(|((_, _, name), object)| (name.clone(), object.clone()))
        .filter(|(name, _)| list_query.after.as_ref().is_none_or(|after| name > after))
        .collect();
    let limit = list_query.limit.unwrap_or(usize::MAX);
    let more = rest.len() > limit;
    let page: Vec<(String, Value)> = rest.into_iter().take(limit).collect();
    let next = page
        .last()
        .map(|(name, _)| name.clone())
        .filter(|_| more)
        .unwrap_or_default();
    let (list, version) = match list_query.kind.split_once('.') {
        None if list_query.kind == "pods" => ("PodList", "v1".to_owned()),
        None => ("InferencePoolList", format!("{POOLS}/v1")),
        Some(("inferenceobjectives", group)) => {
            ("InferenceObjectiveList", format!("{group}/v1alpha2"))
        }
        Some((_, group)) => ("InferenceModelRewriteList", format!("{group}/v1alpha2")),
    };
    let body = json!({
        "kind": list, "apiVersion": version,
        "metadata": {"resourceVersion": cluster.version.to_string(), "continue": next},
        "items": page.into_iter().map(|(_, object)| object).collect::<Vec<_>>(),
    });
    (
        [(header::CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
        .into_response()
}

fn watch_response(shared: &SharedCluster, list_query: ListQuery) -> Response {
    let from = list_query.version.unwrap_or_default();
    let end = tokio::time::Instant::now() + list_query.timeout;
    let number = {
        let mut cluster = shared.cluster.lock();
        cluster.watches += 1;
        cluster.watches
    };
    let state = (shared.clone(), list_query, from, shared.changed.subscribe());
    let events = stream::unfold(
        state,
        move |(shared, list_query, from, mut changed)| async move {
            let mut is_idle = false;
            loop {
                changed.borrow_and_update();
                if shared.cluster.lock().dead >= number {
                    std::future::pending::<()>().await;
                }
                if shared.cluster.lock().outage.is_some() {
                    return None;
                }
                if let Some((text, at)) =
                    pending_events(&shared, &list_query, from, is_idle && list_query.bookmarks)
                {
                    return Some((Ok::<_, io::Error>(text), (shared, list_query, at, changed)));
                }
                tokio::select! {
                    () = tokio::time::sleep_until(end) => return None,
                    _ = changed.changed() => {}
                    () = tokio::time::sleep(BOOKMARK) => is_idle = true,
                }
            }
        },
    );
    (
        [(header::CONTENT_TYPE, "application/json")],
        Body::from_stream(events),
    )
        .into_response()
}

/// Returns the watch events after a version as text, and the version of the last one.
fn pending_events(
    shared: &SharedCluster,
    list_query: &ListQuery,
    from: u64,
    bookmark: bool,
) -> Option<(String, u64)> {
    let cluster = shared.cluster.lock();
    if from < cluster.compacted {
        let expired = status(
            StatusCode::GONE,
            "Expired",
            &format!("too old resource version: {from} ({})", cluster.compacted),
        );
        return Some((
            format!("{}\n", json!({"type": "ERROR", "object": expired})),
            u64::MAX,
        ));
    }
    let later = cluster
        .changes
        .iter()
        .filter(|change| change.version > from);
    let mut text: String = later
        .filter_map(|change| list_query.watch_event(change))
        .map(|event| format!("{event}\n"))
        .collect();
    if text.is_empty() && bookmark {
        let metadata = json!({"resourceVersion": cluster.version.to_string()});
        let object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": metadata});
        text = format!("{}\n", json!({"type": "BOOKMARK", "object": object}));
    }
    (!text.is_empty()).then_some((text, cluster.version))
}
