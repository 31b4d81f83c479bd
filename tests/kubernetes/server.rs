//! A small API server of Kubernetes: list and watch of pods and InferencePools, with resource versions, pages, bookmarks and
//! selectors, over TLS and with a token, and the pages by which clients find out what there is. It grants what the Role of the
//! conformance fixture grants, get, list and watch of these two, and refuses everything else, the objects beside the pools too,
//! until they are allowed. Strict about what it is asked, and able to fail in the ways in which real ones do. The other half is
//! what a cluster would do to its objects.

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

/// Who may ask.
pub(crate) const TOKEN: &str = "a-token-of-a-service-account";

/// How often a watch that is silent is told where it is.
const BOOKMARK: Duration = Duration::from_millis(200);

/// What a query may say; anything else is a mistake of the client.
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

/// Kinds beside the pools, with their API groups. Nobody may read them before they are allowed.
pub(crate) const OPTIONAL: [&str; 4] = [
    "inferenceobjectives.llm-d.ai",
    "inferencemodelrewrites.llm-d.ai",
    "inferenceobjectives.inference.networking.x-k8s.io",
    "inferencemodelrewrites.inference.networking.x-k8s.io",
];

/// An object as it is, or was when it left, at a version.
#[derive(Clone)]
struct Change {
    version: u64,
    /// `pods`, `inferencepools`, or one of [`OPTIONAL`].
    kind: String,
    before: Option<Value>,
    after: Option<Value>,
}

#[derive(Default)]
struct Cluster {
    version: u64,
    objects: BTreeMap<(String, String, String), Value>,
    changes: Vec<Change>,
    /// Changes up to here are forgotten.
    compacted: u64,
    /// What nobody may list or watch.
    forbidden: BTreeSet<String>,
    /// Resources that are not installed.
    missing: BTreeSet<String>,
    /// Watches that were begun, and up to which of them their connections are dead, though they are open.
    watches: u64,
    dead: u64,
    /// Mistakes of clients.
    violations: Vec<String>,
    lists: u64,
    /// How often each of [`OPTIONAL`] was refused.
    refused: BTreeMap<String, u64>,
    /// How often somebody asked what there is.
    discoveries: u64,
    /// Resources that may be listed and not watched.
    unwatched: BTreeSet<String>,
    /// The status, and the value of `Retry-After`, of every answer.
    outage: Option<(u16, u64)>,
    /// Requests that are never answered.
    is_frozen: bool,
    requests: u64,
    token: String,
}

/// The objects, which outlive the server.
pub(crate) struct ApiServer {
    cluster: Arc<Mutex<Cluster>>,
    changed: watch::Sender<u64>,
    pub(crate) address: SocketAddr,
    certificate: rcgen::CertifiedKey<rcgen::KeyPair>,
    running: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct Shared {
    cluster: Arc<Mutex<Cluster>>,
    changed: watch::Sender<u64>,
}

impl ApiServer {
    /// Serves an empty cluster.
    pub(crate) async fn start() -> Self {
        let certificate =
            rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()])
                .unwrap();
        let mut server = Self {
            cluster: Arc::new(Mutex::new(Cluster {
                forbidden: OPTIONAL.map(str::to_owned).into(),
                token: TOKEN.to_owned(),
                ..Cluster::default()
            })),
            changed: watch::Sender::default(),
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            certificate,
            running: None,
        };
        server.resume().await;
        server
    }

    /// Ends the server and every connection to it.
    pub(crate) async fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
            _ = running.await;
        }
    }

    /// Serves again where it was.
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
        let shared = Shared {
            cluster: self.cluster.clone(),
            changed: self.changed.clone(),
        };
        let routes = Router::new().fallback(answer).with_state(shared);
        self.running = Some(tokio::spawn(serve(
            listener,
            TlsAcceptor::from(Arc::new(tls)),
            routes,
        )));
    }

    /// What a client needs to know.
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

    /// Adds an object or puts another in its place.
    pub(crate) fn put(&self, kind: &str, mut object: Value) {
        let mut cluster = self.cluster.lock();
        cluster.version += 1;
        object["metadata"]["resourceVersion"] = json!(cluster.version.to_string());
        let before = cluster.objects.insert(key(kind, &object), object.clone());
        cluster.log(kind, before, Some(object));
        self.changed.send_replace(cluster.version);
    }

    /// Changes an object that is there.
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

    /// Forgets all changes: whoever watches from an older version has to list anew.
    pub(crate) fn compact(&self) {
        let mut cluster = self.cluster.lock();
        // Something else was changed meanwhile, or nobody would be behind.
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

    /// Nothing comes any more on the watches that there are, as through a gateway that has forgotten them.
    pub(crate) fn kill_watches(&self) {
        let mut cluster = self.cluster.lock();
        cluster.dead = cluster.watches;
    }

    pub(crate) fn forbid_watch(&self, kind: &str, forbidden: bool) {
        let mut cluster = self.cluster.lock();
        if forbidden {
            cluster.unwatched.insert(kind.to_owned())
        } else {
            cluster.unwatched.remove(kind)
        };
    }

    /// Answers every request with this status and this `Retry-After`, and ends all watches.
    pub(crate) fn fail_with(&self, outage: Option<(u16, u64)>) {
        self.cluster.lock().outage = outage;
        self.changed.send_replace(0);
    }

    /// Neither the watches nor any request from now on is answered, not even after [`thaw`](Self::thaw).
    pub(crate) fn freeze(&self) {
        self.kill_watches();
        self.cluster.lock().is_frozen = true;
    }

    /// Answers new requests again.
    pub(crate) fn thaw(&self) {
        self.cluster.lock().is_frozen = false;
    }

    /// Accepts this token only.
    pub(crate) fn set_token(&self, token: &str) {
        self.cluster.lock().token = token.to_owned();
    }

    /// Serves with another certificate from the next [`resume`](Self::resume) on.
    pub(crate) fn replace_certificate(&mut self) {
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        self.certificate = rcgen::generate_simple_self_signed(names).unwrap();
    }

    pub(crate) fn authority(&self) -> String {
        self.certificate.cert.pem()
    }

    /// All requests for objects.
    pub(crate) fn requests(&self) -> u64 {
        self.cluster.lock().requests
    }

    /// How often was listed.
    pub(crate) fn lists(&self) -> u64 {
        self.cluster.lock().lists
    }

    /// How often somebody asked for one of [`OPTIONAL`] and might not.
    pub(crate) fn refused(&self, kind: &str) -> u64 {
        self.cluster
            .lock()
            .refused
            .get(kind)
            .copied()
            .unwrap_or_default()
    }

    /// How often somebody asked what there is.
    pub(crate) fn discoveries(&self) -> u64 {
        self.cluster.lock().discoveries
    }

    /// What clients asked that they may not.
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

impl Cluster {
    fn log(&mut self, kind: &str, before: Option<Value>, after: Option<Value>) {
        let version = self.version;
        self.changes.push(Change {
            version,
            kind: kind.to_owned(),
            before,
            after,
        });
    }
}

fn key(kind: &str, object: &Value) -> (String, String, String) {
    let of = |name: &str| object["metadata"][name].as_str().unwrap().to_owned();
    (kind.to_owned(), of("namespace"), of("name"))
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// Waits while a connection of another test has the port.
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

/// Accepts for ever; dropping it ends the connections with it.
async fn serve(listener: TcpListener, tls: TlsAcceptor, routes: Router) {
    let (send, connections) = mpsc::channel(16);
    let address = listener.local_addr().unwrap();
    let accept = async move {
        let mut handshakes = JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            let (tls, send) = (tls.clone(), send.clone());
            handshakes.spawn(async move {
                if let Ok(socket) = tls.accept(socket).await {
                    _ = send.send(socket).await;
                }
            });
        }
    };
    let cut = watch::Sender::new(());
    let door = Door {
        connections,
        address,
        cut: cut.clone(),
    };
    tokio::select! {
        () = accept => {}
        _ = axum::serve(door, routes) => {}
    }
}

struct Door {
    connections: mpsc::Receiver<TlsStream<TcpStream>>,
    address: SocketAddr,
    cut: watch::Sender<()>,
}

impl axum::serve::Listener for Door {
    type Io = support::Cut<TlsStream<TcpStream>>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.connections.recv().await {
            Some(socket) => (
                support::Cut::new(socket, self.cut.subscribe()),
                self.address,
            ),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// Connections that end with the server, whose tasks nobody else could end.
mod support {
    use std::future::Future;
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio::sync::watch;

    pub(crate) struct Cut<S> {
        socket: S,
        cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    }

    impl<S> Cut<S> {
        pub(crate) fn new(socket: S, mut alive: watch::Receiver<()>) -> Self {
            let cut = async move { while alive.changed().await.is_ok() {} };
            Self {
                socket,
                cut: Box::pin(cut),
            }
        }
    }

    impl<S: AsyncRead + Unpin> AsyncRead for Cut<S> {
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

    impl<S: AsyncWrite + Unpin> AsyncWrite for Cut<S> {
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

async fn answer(State(shared): State<Shared>, request: Request) -> Response {
    let (is_frozen, outage, bearer) = {
        let mut cluster = shared.cluster.lock();
        cluster.requests += 1;
        (
            cluster.is_frozen,
            cluster.outage,
            format!("Bearer {}", cluster.token),
        )
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
    let (path, query) = (
        request.uri().path(),
        request.uri().query().unwrap_or_default(),
    );
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
    let place = place(path).filter(|_| request.method() == Method::GET);
    let forbidden = || format!("forbidden: User \"u\" cannot {} {path}", request.method());
    let Some((namespace, kind)) = place else {
        shared.cluster.lock().violations.push(forbidden());
        return failure(StatusCode::FORBIDDEN, "Forbidden", &forbidden());
    };
    let asked = match Asked::read(&namespace, &kind, query) {
        Ok(asked) => asked,
        Err(problem) => {
            shared.cluster.lock().violations.push(problem.clone());
            return failure(StatusCode::BAD_REQUEST, "BadRequest", &problem);
        }
    };
    let mut cluster = shared.cluster.lock();
    // Who may not look is not told whether there is something to be seen.
    if cluster.forbidden.contains(&kind) {
        *cluster.refused.entry(kind).or_default() += 1;
        return failure(StatusCode::FORBIDDEN, "Forbidden", &forbidden());
    }
    if asked.watch && cluster.unwatched.contains(&kind) {
        return failure(
            StatusCode::FORBIDDEN,
            "Forbidden",
            "pods is forbidden: User \"u\" cannot watch resource",
        );
    }
    if cluster.missing.contains(&kind) {
        return failure(
            StatusCode::NOT_FOUND,
            "NotFound",
            "the server could not find the requested resource",
        );
    }
    drop(cluster);
    if asked.watch {
        watches(&shared, asked)
    } else {
        lists(&shared, &asked)
    }
}

/// Answers whether the client may list or watch a kind.
async fn review_access(shared: &Shared, request: Request) -> Response {
    let body = axum::body::to_bytes(request.into_body(), 65_536)
        .await
        .unwrap();
    let mut review: Value = serde_json::from_slice(&body).unwrap();
    let wanted = &review["spec"]["resourceAttributes"];
    let of = |key: &str| wanted[key].as_str().unwrap_or_default();
    let kind = match of("group") {
        "" | POOLS => of("resource").to_owned(),
        group => format!("{}.{group}", of("resource")),
    };
    let cluster = shared.cluster.lock();
    let is_allowed = match of("verb") {
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

/// Of which namespace, and of which kind, a path lists the objects.
fn place(path: &str) -> Option<(String, String)> {
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

/// What there is, as every client may ask that has a token.
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

/// A question, understood.
#[derive(Clone)]
struct Asked {
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

impl Asked {
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
        let pairs = |text: &str| -> Result<Vec<(String, String)>, String> {
            let pair = |pair: &str| {
                pair.split_once('=')
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
            };
            text.split(',')
                .map(|one| pair(one).ok_or_else(|| format!("selector {text:?}")))
                .collect()
        };
        let labels = all
            .get("labelSelector")
            .map(|text| pairs(text))
            .transpose()?
            .unwrap_or_default();
        let fields = all
            .get("fieldSelector")
            .map(|text| pairs(text))
            .transpose()?
            .unwrap_or_default();
        let name = match &fields[..] {
            [] => None,
            [(field, value)] if field == "metadata.name" => Some(value.clone()),
            other => return Err(format!("field selector {other:?}")),
        };
        if kind == "pods" && labels.is_empty() {
            return Err("all pods of a namespace are nobody's affair".to_owned());
        }
        let watch = all.get("watch").is_some_and(|text| text == "true");
        let version = number("resourceVersion")?;
        if watch && version.is_none() {
            return Err("a watch begins at a version".to_owned());
        }
        let limit = number("limit")?
            .map(|limit| limit as usize)
            .filter(|limit| *limit > 0);
        let timeout = Duration::from_secs(number("timeoutSeconds")?.unwrap_or(300));
        let bookmarks = all
            .get("allowWatchBookmarks")
            .is_some_and(|text| text == "true");
        let (namespace, kind) = (namespace.to_owned(), kind.to_owned());
        Ok(Self {
            namespace,
            kind,
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

    /// As a watch tells a change.
    fn tells(&self, change: &Change) -> Option<Value> {
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
        // Of who leaves the last state is told, at the version at which it left.
        event["object"]["metadata"]["resourceVersion"] = json!(change.version.to_string());
        Some(event)
    }
}

fn lists(shared: &Shared, asked: &Asked) -> Response {
    let mut cluster = shared.cluster.lock();
    cluster.lists += 1;
    let found = cluster
        .objects
        .iter()
        .filter(|((kind, ..), object)| *kind == asked.kind && asked.has(object));
    let rest: Vec<(String, Value)> = found
        .map(|((_, _, name), object)| (name.clone(), object.clone()))
        .filter(|(name, _)| asked.after.as_ref().is_none_or(|after| name > after))
        .collect();
    let limit = asked.limit.unwrap_or(usize::MAX);
    let more = rest.len() > limit;
    let page: Vec<(String, Value)> = rest.into_iter().take(limit).collect();
    let next = page
        .last()
        .map(|(name, _)| name.clone())
        .filter(|_| more)
        .unwrap_or_default();
    let (list, version) = match asked.kind.split_once('.') {
        None if asked.kind == "pods" => ("PodList", "v1".to_owned()),
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

fn watches(shared: &Shared, asked: Asked) -> Response {
    let from = asked.version.unwrap_or_default();
    let end = tokio::time::Instant::now() + asked.timeout;
    let number = {
        let mut cluster = shared.cluster.lock();
        cluster.watches += 1;
        cluster.watches
    };
    let state = (shared.clone(), asked, from, shared.changed.subscribe());
    let events = stream::unfold(
        state,
        move |(shared, asked, from, mut changed)| async move {
            let mut silent = false;
            loop {
                changed.borrow_and_update();
                if shared.cluster.lock().dead >= number {
                    std::future::pending::<()>().await;
                }
                if shared.cluster.lock().outage.is_some() {
                    return None;
                }
                if let Some((text, at)) = tells(&shared, &asked, from, silent && asked.bookmarks) {
                    return Some((Ok::<_, io::Error>(text), (shared, asked, at, changed)));
                }
                tokio::select! {
                    () = tokio::time::sleep_until(end) => return None,
                    _ = changed.changed() => {}
                    () = tokio::time::sleep(BOOKMARK) => silent = true,
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

/// What happened after a version, as text; and up to which version that is.
fn tells(shared: &Shared, asked: &Asked, from: u64, bookmark: bool) -> Option<(String, u64)> {
    let cluster = shared.cluster.lock();
    if from < cluster.compacted {
        let gone = status(
            StatusCode::GONE,
            "Expired",
            &format!("too old resource version: {from} ({})", cluster.compacted),
        );
        return Some((
            format!("{}\n", json!({"type": "ERROR", "object": gone})),
            u64::MAX,
        ));
    }
    let later = cluster
        .changes
        .iter()
        .filter(|change| change.version > from);
    let mut text: String = later
        .filter_map(|change| asked.tells(change))
        .map(|event| format!("{event}\n"))
        .collect();
    if text.is_empty() && bookmark {
        let metadata = json!({"resourceVersion": cluster.version.to_string()});
        let object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": metadata});
        text = format!("{}\n", json!({"type": "BOOKMARK", "object": object}));
    }
    (!text.is_empty()).then_some((text, cluster.version))
}
