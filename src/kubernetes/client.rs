//! Requests to the API server: lists, watches and access reviews. Each has a deadline, and errors
//! name the request and its cause.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http;
use kube::Resource as _;
use kube::api::{ListParams, PostParams, WatchParams};
use kube::client::Body;
use kube::core::{ApiResource, DynamicObject, Request};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};
use warmroute_server::fleet::discovery::kubernetes::KubernetesConfig;

use super::credentials::{ApiConnection, CredentialSource, describe};
use super::error::{ApiVerb, RequestError, RequestFailure, message};
use super::object_watch::{ObjectWatch, read_body};
use super::store::{MAX_OBJECTS, ReceivedObject};

/// Additional time before a connection counts as dead, after the API server should have ended the
/// watch.
const SILENCE_MARGIN: Duration = Duration::from_secs(5);
/// Status of an expired resource version or continue token.
const EXPIRED: u16 = 410;
/// Objects per list page.
const PAGE_SIZE: u32 = 500;
/// Maximum length of a list page. After an expired continue token, one page has all objects.
const MAX_PAGE: usize = 256 << 20;
/// Maximum length of a status or an access review.
const MAX_STATUS: usize = 1 << 20;
/// Path of access reviews. Any authenticated user may review its own access.
const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
/// Maximum `timeoutSeconds` of a watch; the default of kube-core.
const MAX_WATCH_SECONDS: u64 = 290;

/// Objects selected by a request.
#[derive(Clone, Debug)]
pub(super) struct ObjectQuery {
    pub(super) resource: ApiResource,
    /// `None`: the namespace of the credentials.
    pub(super) namespace: Option<String>,
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
}

impl ObjectQuery {
    fn resource_name(&self) -> String {
        match self.resource.group.as_str() {
            "" => self.resource.plural.clone(),
            group => format!("{}.{group}", self.resource.plural),
        }
    }
}

/// A permission, as in a Role.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResourceAccess<'a> {
    /// `None`: the namespace of the credentials.
    pub(super) namespace: Option<&'a str>,
    pub(super) verb: &'static str,
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    /// `None`: all objects.
    pub(super) name: Option<&'a str>,
}

/// All objects of a query and their resource version.
pub(super) struct ObjectList<K> {
    pub(super) objects: Vec<ReceivedObject<K>>,
    pub(super) version: String,
}

#[derive(Deserialize)]
struct RawList<'a> {
    metadata: RawListMetadata,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawListMetadata {
    resource_version: Option<String>,
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// API client that reloads its credentials. Clones share one connection.
#[derive(Clone)]
pub(super) struct ApiClient(Arc<SharedClient>);

struct SharedClient {
    source: CredentialSource,
    /// Time after which the API server ends a watch.
    silence: Duration,
    deadline: Duration,
    current: Mutex<Option<CurrentConnection>>,
}

struct CurrentConnection {
    connection: Arc<ApiConnection>,
    opened: Instant,
    /// Reason why newer credentials are not in use.
    problem: Option<String>,
    /// True if pooled TCP connections may be dead, so that the next request opens a new one.
    is_suspect: bool,
}

impl ApiClient {
    pub(super) fn new(config: &KubernetesConfig) -> Self {
        Self::with_deadline(config, config.watch_timeout.get() + SILENCE_MARGIN)
    }

    pub(super) fn with_deadline(config: &KubernetesConfig, deadline: Duration) -> Self {
        let source = CredentialSource::from(config);
        let silence = config.watch_timeout.get();
        Self(Arc::new(SharedClient {
            source,
            silence,
            deadline,
            current: Mutex::default(),
        }))
    }

    /// Returns the maximum duration of a request, which is also the maximum time without a byte on
    /// an open watch.
    pub(super) fn deadline(&self) -> Duration {
        self.0.deadline
    }

    /// Returns the default namespace of the credentials.
    pub(super) async fn default_namespace(&self) -> Result<String, String> {
        Ok(self.connection().await?.namespace.clone())
    }

    /// Returns a connection with the current credentials. If changed credential files are unusable,
    /// the previous credentials stay in use.
    async fn connection(&self) -> Result<Arc<ApiConnection>, String> {
        let mut current = self.0.current.lock().await;
        if let Some(current) = &*current
            && !current.is_suspect
            && !current.connection.files.have_changed().await
        {
            return Ok(current.connection.clone());
        }
        let connected = self.0.source.connect().await;
        match (connected, &mut *current) {
            (Ok(connection), known) => {
                if known.as_ref().is_some_and(|known| !known.is_suspect) {
                    info!(
                        address = connection.address,
                        "Kubernetes credentials reloaded"
                    );
                }
                let connection = Arc::new(connection);
                *known = Some(CurrentConnection {
                    connection: connection.clone(),
                    opened: Instant::now(),
                    problem: None,
                    is_suspect: false,
                });
                Ok(connection)
            }
            (Err(reason), Some(known)) => {
                if known.problem.as_ref() != Some(&reason) {
                    warn!(
                        reason,
                        "Kubernetes credentials reload failed; the current credentials stay in use"
                    );
                    known.problem = Some(reason);
                }
                Ok(known.connection.clone())
            }
            (Err(reason), None) => Err(reason),
        }
    }

    /// Marks the connection as suspect after a request timed out, if it was opened before `before`:
    /// its other pooled TCP connections may be dead, too.
    async fn mark_suspect(&self, before: Instant) {
        let mut current = self.0.current.lock().await;
        if let Some(current) = current.as_mut().filter(|current| current.opened < before) {
            current.is_suspect = true;
        }
    }

    /// Lists all objects, page by page. Pages after more than [`MAX_OBJECTS`] objects are not read.
    pub(super) async fn list<K: DeserializeOwned>(
        &self,
        query: &ObjectQuery,
    ) -> Result<ObjectList<K>, RequestError> {
        let mut parameters = ListParams {
            label_selector: query.labels.clone(),
            field_selector: query.fields.clone(),
            limit: Some(PAGE_SIZE),
            ..ListParams::default()
        };
        let mut objects = Vec::new();
        loop {
            let page = match self.list_page(query, &parameters, &mut objects).await {
                Ok(page) => page,
                // The API server no longer has the state of the first pages, so everything is
                // listed in one page.
                Err(error)
                    if error.code() == Some(EXPIRED)
                        && parameters.continue_token.take().is_some() =>
                {
                    parameters.limit = None;
                    objects.clear();
                    continue;
                }
                Err(error) => return Err(error),
            };
            match (
                page.next.filter(|next| !next.is_empty()),
                page.resource_version,
            ) {
                (Some(_), Some(version)) if objects.len() > MAX_OBJECTS => {
                    return Ok(ObjectList { objects, version });
                }
                (Some(next), _) => parameters.continue_token = Some(next),
                (None, Some(version)) => return Ok(ObjectList { objects, version }),
                (None, None) => {
                    let failure =
                        RequestFailure::Malformed("the list has no resourceVersion".to_owned());
                    return Err(self.error(query, ApiVerb::List, failure).await);
                }
            }
        }
    }

    /// Checks that the objects can be listed, by a list of one object.
    pub(super) async fn try_list(&self, query: &ObjectQuery) -> Result<(), RequestError> {
        let parameters = ListParams::default().limit(1);
        self.list_page::<serde::de::IgnoredAny>(query, &parameters, &mut Vec::new())
            .await
            .map(drop)
    }

    async fn list_page<K: DeserializeOwned>(
        &self,
        query: &ObjectQuery,
        parameters: &ListParams,
        objects: &mut Vec<ReceivedObject<K>>,
    ) -> Result<RawListMetadata, RequestError> {
        let body = self.send(query, ResourceRequest::List(parameters)).await?;
        let read = timeout_at(body.deadline, read_body(body.body, MAX_PAGE)).await;
        let parsed = read
            .unwrap_or(Err(RequestFailure::Timeout(self.deadline())))
            .and_then(|bytes| parse_page(&bytes, objects).map_err(RequestFailure::Malformed));
        match parsed {
            Ok(metadata) => Ok(metadata),
            Err(failure) => Err(self.fail(query, ApiVerb::List, failure, body.sent).await),
        }
    }

    /// Opens a watch.
    pub(super) async fn watch(
        &self,
        query: &ObjectQuery,
        version: &str,
    ) -> Result<ObjectWatch, RequestError> {
        let seconds = self.0.silence.as_secs().clamp(1, MAX_WATCH_SECONDS);
        let parameters = WatchParams {
            label_selector: query.labels.clone(),
            field_selector: query.fields.clone(),
            timeout: u32::try_from(seconds).ok(),
            bookmarks: true,
            send_initial_events: false,
        };
        let answer = self
            .send(query, ResourceRequest::Watch(&parameters, version))
            .await?;
        Ok(ObjectWatch::new(answer.body))
    }

    async fn send(
        &self,
        query: &ObjectQuery,
        request: ResourceRequest<'_>,
    ) -> Result<OpenBody, RequestError> {
        let sent = Instant::now();
        let deadline = sent + self.deadline();
        let response = timeout_at(deadline, self.open(query, request)).await;
        match response.unwrap_or(Err(RequestFailure::Timeout(self.deadline()))) {
            Ok(body) => Ok(OpenBody {
                body,
                sent,
                deadline,
            }),
            Err(failure) => Err(self.fail(query, request.verb(), failure, sent).await),
        }
    }

    async fn open(
        &self,
        query: &ObjectQuery,
        request: ResourceRequest<'_>,
    ) -> Result<Body, RequestFailure> {
        let connection = self
            .connection()
            .await
            .map_err(RequestFailure::Credentials)?;
        let namespace = query.namespace.as_ref().unwrap_or(&connection.namespace);
        let url = Request::new(DynamicObject::url_path(&query.resource, Some(namespace)));
        let request = match request {
            ResourceRequest::List(parameters) => url.list(parameters),
            ResourceRequest::Watch(parameters, version) => url.watch(parameters, version),
        };
        let request = request.map_err(|error| RequestFailure::Malformed(describe(&error)))?;
        Self::exchange(&connection, request.map(Body::from)).await
    }

    /// Sends a request and returns the body of a successful response.
    async fn exchange(
        connection: &ApiConnection,
        request: http::Request<Body>,
    ) -> Result<Body, RequestFailure> {
        let sent = connection.client.send(request).await;
        let response = sent.map_err(|error| RequestFailure::Transport(describe(&error)))?;
        let code = response.status().as_u16();
        if response.status().is_success() {
            return Ok(response.into_body());
        }
        let retry_after = response
            .headers()
            .get("retry-after")
            .and_then(|value| value.to_str().ok()?.parse().ok());
        let text = read_body(response.into_body(), MAX_STATUS)
            .await
            .unwrap_or_default();
        let retry_after = retry_after.map(Duration::from_secs);
        Err(RequestFailure::Status {
            code,
            message: message(&text),
            retry_after,
        })
    }

    /// Returns whether the credentials have a permission, by a `SelfSubjectAccessReview`.
    pub(super) async fn is_allowed(&self, access: &ResourceAccess<'_>) -> Result<bool, String> {
        #[derive(Deserialize)]
        struct AccessReview {
            status: ReviewStatus,
        }
        #[derive(Deserialize)]
        struct ReviewStatus {
            allowed: bool,
        }
        let review = async {
            let connection = self.connection().await?;
            let namespace = access.namespace.unwrap_or(&connection.namespace);
            let ResourceAccess {
                verb,
                group,
                resource,
                name,
                ..
            } = access;
            let attributes = json!({"namespace": namespace, "verb": verb, "group": group, "resource": resource, "name": name});
            let body = json!({
                "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            });
            let request = Request::new(ACCESS_REVIEWS)
                .create(&PostParams::default(), body.to_string().into_bytes());
            let request = request.map_err(|error| describe(&error))?;
            let body = Self::exchange(&connection, request.map(Body::from))
                .await
                .map_err(|error| error.to_string())?;
            let bytes = read_body(body, MAX_STATUS)
                .await
                .map_err(|error| error.to_string())?;
            let review: AccessReview =
                serde_json::from_slice(&bytes).map_err(|error| describe(&error))?;
            Ok(review.status.allowed)
        };
        let deadline = self.deadline();
        let answer = tokio::time::timeout(deadline, review).await;
        answer.unwrap_or_else(|_| Err(RequestFailure::Timeout(deadline).to_string()))
    }

    /// Builds the error of a failed request. After a timeout, also marks the connection as suspect.
    async fn fail(
        &self,
        query: &ObjectQuery,
        verb: ApiVerb,
        failure: RequestFailure,
        sent: Instant,
    ) -> RequestError {
        let is_timeout = matches!(failure, RequestFailure::Timeout(_));
        let error = self.error(query, verb, failure).await;
        if is_timeout {
            self.mark_suspect(sent).await;
        }
        error
    }

    /// Builds the error of a watch that timed out.
    pub(super) async fn silent_watch(&self, query: &ObjectQuery, opened: Instant) -> RequestError {
        self.fail(
            query,
            ApiVerb::Watch,
            RequestFailure::Timeout(self.deadline()),
            opened,
        )
        .await
    }

    pub(super) async fn error(
        &self,
        query: &ObjectQuery,
        verb: ApiVerb,
        failure: RequestFailure,
    ) -> RequestError {
        let current = self.0.current.lock().await;
        let connection = current.as_ref().map(|current| &current.connection);
        let file = |file: Option<&PathBuf>, before: &str| {
            file.map(|path| format!("{before}{}", path.display()))
                .unwrap_or_default()
        };
        let files = connection.map(|connection| &connection.files);
        let namespace = query
            .namespace
            .clone()
            .or_else(|| Some(connection?.namespace.clone()));
        let ApiResource {
            group,
            version,
            kind,
            ..
        } = &query.resource;
        let slash = if group.is_empty() { "" } else { "/" };
        RequestError {
            verb,
            resource: query.resource_name(),
            kind: format!("{kind} of {group}{slash}{version}"),
            namespace: namespace.unwrap_or_default(),
            address: connection
                .map(|connection| connection.address.clone())
                .unwrap_or_default(),
            token_file: file(files.and_then(|files| files.token.as_ref()), " of "),
            authority_file: file(
                files.and_then(|files| files.authority.as_ref()),
                "; the certificate authority is read from ",
            ),
            failure,
        }
    }
}

/// Response body in progress.
struct OpenBody {
    body: Body,
    sent: Instant,
    deadline: Instant,
}

/// List or watch request of the Kubernetes API, with its parameters.
#[derive(Clone, Copy)]
enum ResourceRequest<'a> {
    List(&'a ListParams),
    Watch(&'a WatchParams, &'a str),
}

impl ResourceRequest<'_> {
    fn verb(self) -> ApiVerb {
        match self {
            Self::List(_) => ApiVerb::List,
            Self::Watch(..) => ApiVerb::Watch,
        }
    }
}

fn parse_page<K: DeserializeOwned>(
    bytes: &[u8],
    objects: &mut Vec<ReceivedObject<K>>,
) -> Result<RawListMetadata, String> {
    let page: RawList<'_> = serde_json::from_slice(bytes)
        .map_err(|error| format!("the response is not a list of objects: {error}"))?;
    objects.extend(
        page.items
            .unwrap_or_default()
            .into_iter()
            .map(|item| ReceivedObject::parse(item.get())),
    );
    Ok(page.metadata)
}
