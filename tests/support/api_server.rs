//! A fake Kubernetes API server. It serves list and watch of pods and InferencePools with resource
//! versions, bookmarks and selectors, over TLS with a bearer token. It grants the Role of the
//! conformance fixture: get, list and watch of these two kinds. Everything else is forbidden,
//! including the optional kinds until a test allows them. It rejects unknown query parameters.
//! Further methods change the objects, as a cluster would.

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
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

const TOKEN: &str = "a-token-of-a-service-account";

/// Interval of bookmarks on an idle watch.
const BOOKMARK: Duration = Duration::from_millis(200);

/// Allowed query parameters. Any other parameter is a client error.
const QUERIES: [&str; 8] = [
    "allowWatchBookmarks",
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
    /// Forbidden or malformed requests.
    violations: Vec<String>,
    /// Number of forbidden requests for each kind of [`OPTIONAL`].
    refused: BTreeMap<String, u64>,
}

/// The fake cluster. Its objects survive [`stop`](Self::stop).
pub(crate) struct ApiServer {
    shared: SharedCluster,
    address: SocketAddr,
    certificate: rcgen::CertifiedKey<rcgen::KeyPair>,
    running: Option<AbortOnDropHandle<()>>,
}

#[derive(Clone, Default)]
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
            shared: SharedCluster::default(),
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            certificate,
            running: None,
        };
        for kind in OPTIONAL {
            server.forbid(kind, true);
        }
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
        let routes = Router::new()
            .fallback(respond)
            .with_state(self.shared.clone());
        let serving = serve(listener, TlsAcceptor::from(Arc::new(tls)), routes);
        self.running = Some(AbortOnDropHandle::new(tokio::spawn(serving)));
    }

    /// Returns the kubeconfig of a client.
    pub(crate) fn kubeconfig(&self) -> Value {
        let authority = STANDARD.encode(self.certificate.cert.pem());
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": {
                "server": format!("https://{}", self.address), "certificate-authority-data": authority,
            }}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "inference"}}],
        })
    }

    /// Creates or replaces an object.
    pub(crate) fn put(&self, kind: &str, mut object: Value) {
        let mut cluster = self.shared.cluster.lock();
        cluster.version += 1;
        object["metadata"]["resourceVersion"] = json!(cluster.version.to_string());
        let before = cluster.objects.insert(key(kind, &object), object.clone());
        cluster.log(kind, before, Some(object));
        self.shared.changed.send_replace(cluster.version);
    }

    /// Changes an existing object.
    pub(crate) fn change(&self, kind: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let key = (kind.to_owned(), "inference".to_owned(), name.to_owned());
        let mut object = self.shared.cluster.lock().objects[&key].clone();
        change(&mut object);
        self.put(kind, object);
    }

    pub(crate) fn delete(&self, kind: &str, name: &str) {
        let mut cluster = self.shared.cluster.lock();
        let mut before = cluster
            .objects
            .remove(&(kind.to_owned(), "inference".to_owned(), name.to_owned()))
            .unwrap();
        cluster.version += 1;
        before["metadata"]["resourceVersion"] = json!(cluster.version.to_string());
        cluster.log(kind, Some(before), None);
        self.shared.changed.send_replace(cluster.version);
    }

    /// Discards the history. A watch that resumes from an older version gets 410 and has to list.
    pub(crate) fn compact(&self) {
        let mut cluster = self.shared.cluster.lock();
        // An unrelated change, so that the current version of every client is too old.
        cluster.version += 1;
        cluster.compacted = cluster.version;
        cluster.changes.clear();
    }

    pub(crate) fn forbid(&self, kind: &str, forbidden: bool) {
        let mut cluster = self.shared.cluster.lock();
        if forbidden {
            cluster.forbidden.insert(kind.to_owned())
        } else {
            cluster.forbidden.remove(kind)
        };
    }

    /// Returns the number of forbidden requests for a kind of [`OPTIONAL`].
    pub(crate) fn refused(&self, kind: &str) -> u64 {
        let cluster = self.shared.cluster.lock();
        cluster.refused.get(kind).copied().unwrap_or_default()
    }

    /// Returns the forbidden or malformed requests.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.shared.cluster.lock().violations.clone()
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
    let mut connections = JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        let tls = tls.clone();
        let service = TowerToHyperService::new(routes.clone());
        connections.spawn(async move {
            let socket = TokioIo::new(tls.accept(socket).await?);
            let connection = http1::Builder::new().serve_connection(socket, service);
            connection.await.map_err(io::Error::other)
        });
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

async fn respond(State(shared): State<SharedCluster>, request: Request) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION);
    if authorization.is_none_or(|value| *value != format!("Bearer {TOKEN}")) {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized");
    }
    let path = request.uri().path();
    let query = request.uri().query().unwrap_or_default();
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
    {
        let mut cluster = shared.cluster.lock();
        if cluster.forbidden.contains(&kind) {
            *cluster.refused.entry(kind).or_default() += 1;
            return failure(StatusCode::FORBIDDEN, "Forbidden", &forbidden());
        }
    }
    if list_query.watch {
        watch_response(&shared, list_query)
    } else {
        list_response(&shared, &list_query)
    }
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
    let cluster = shared.cluster.lock();
    let found = cluster
        .objects
        .iter()
        .filter(|((kind, ..), object)| *kind == list_query.kind && list_query.has(object));
    let items: Vec<&Value> = found.map(|(_, object)| object).collect();
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
        "metadata": {"resourceVersion": cluster.version.to_string()},
        "items": items,
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
    let state = (shared.clone(), list_query, from, shared.changed.subscribe());
    let events = stream::unfold(
        state,
        move |(shared, list_query, from, mut changed)| async move {
            let mut is_idle = false;
            loop {
                changed.borrow_and_update();
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
