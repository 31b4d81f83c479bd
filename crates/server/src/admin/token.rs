//! Bearer token of the admin pages. Only its hash is stored, and hashes are compared in constant
//! time, so neither a memory dump nor the response time reveals the token. Probes need no token,
//! because orchestrators have none.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::Router as Routes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use tracing::{info, warn};

use warmroute_metrics::{Metrics, count_outcome};
use warmroute_runtime::tls::FileBacked;
use warmroute_settings::{MAX_SECRET_FILE, read_regular_file};

/// Paths that need no token.
const PROBE_PATHS: [&str; 2] = ["/healthz", "/readyz"];

/// Token from a file. Reloads when the file changes.
pub struct AdminToken {
    path: PathBuf,
    hash: ArcSwap<blake3::Hash>,
    /// Error of the last read; `None` if it succeeded.
    last_error: Mutex<Option<String>>,
    metrics: Arc<Metrics>,
}

impl AdminToken {
    /// Reads the token file. Returns an error message if it is unusable.
    pub fn load(path: PathBuf, metrics: Arc<Metrics>) -> Result<Arc<Self>, String> {
        let hash = ArcSwap::from_pointee(Self::hash_file(&path)?);
        Ok(Arc::new(Self {
            path,
            hash,
            last_error: Mutex::new(None),
            metrics,
        }))
    }

    pub(super) fn hash_file(path: &Path) -> Result<blake3::Hash, String> {
        let text = read_regular_file(path, MAX_SECRET_FILE)
            .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        let token = text.trim_ascii();
        if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
            return Err(format!(
                "{} must contain a token: one line of printable ASCII characters",
                path.display()
            ));
        }
        Ok(blake3::hash(token))
    }

    /// Returns whether the `authorization` header contains the token.
    fn is_authorized(&self, headers: &HeaderMap) -> bool {
        let mut given = headers.get_all(header::AUTHORIZATION).iter();
        // Two headers are ambiguous and rejected.
        let (Some(value), None) = (given.next(), given.next()) else {
            return false;
        };
        let Some((scheme, token)) = value.as_bytes().split_at_checked("Bearer ".len()) else {
            return false;
        };
        scheme.eq_ignore_ascii_case(b"Bearer ")
            && blake3::hash(token.trim_ascii()) == **self.hash.load()
    }

    fn count_reload(&self, outcome: &'static str) {
        count_outcome(&self.metrics.listeners.admin_token_reloads, outcome);
    }
}

impl FileBacked for AdminToken {
    fn files(&self) -> Vec<PathBuf> {
        vec![self.path.clone()]
    }

    fn reload(&self) {
        let mut last_error = self.last_error.lock();
        match Self::hash_file(&self.path) {
            Ok(hash) => {
                *last_error = None;
                if hash != **self.hash.load() {
                    self.hash.store(Arc::new(hash));
                    self.count_reload("applied");
                    info!("admin token reloaded");
                }
            }
            Err(error) => {
                if last_error.as_ref() != Some(&error) {
                    warn!(
                        error,
                        "admin token reload rejected; the current token stays active"
                    );
                    self.count_reload("invalid");
                }
                *last_error = Some(error);
            }
        }
    }
}

/// Wraps routes so that they require the token.
pub fn require_token(routes: Routes, token: Arc<AdminToken>) -> Routes {
    routes.layer(middleware::from_fn_with_state(token, check_token))
}

async fn check_token(
    State(token): State<Arc<AdminToken>>,
    request: Request,
    next: Next,
) -> Response {
    if PROBE_PATHS.contains(&request.uri().path()) || token.is_authorized(request.headers()) {
        return next.run(request).await;
    }
    (
        StatusCode::UNAUTHORIZED,
        [(header::WWW_AUTHENTICATE, "Bearer")],
        "this page requires a bearer token (listeners.admin.token_file) in the header \
         `authorization: Bearer TOKEN`; /healthz and /readyz require none\n",
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use warmroute_metrics::OutcomeLabel;

    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        values
            .iter()
            .map(|value| (header::AUTHORIZATION, value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn only_the_token_authorizes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "s3cret\n").unwrap();
        let token = AdminToken::load(path.clone(), Arc::new(Metrics::new())).unwrap();
        for (given, admitted) in [
            (&["Bearer s3cret"][..], true),
            (&["bearer s3cret"], true),
            (&["Bearer  s3cret "], true),
            (&[], false),
            (&[""], false),
            (&["Bearer"], false),
            (&["Bearer "], false),
            (&["s3cret"], false),
            (&["Basic s3cret"], false),
            (&["Bearer s3cre"], false),
            (&["Bearer s3cret2"], false),
            (&["Bearer S3CRET"], false),
            (&["Bearer s3cret", "Bearer s3cret"], false),
        ] {
            assert_eq!(token.is_authorized(&headers(given)), admitted, "{given:?}");
        }
    }

    #[test]
    fn token_reload_replaces_only_with_valid_token() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let metrics = Arc::new(Metrics::new());
        assert!(
            AdminToken::load(path.clone(), metrics.clone()).is_err(),
            "there is no file"
        );
        std::fs::write(&path, "one").unwrap();
        let token = AdminToken::load(path.clone(), metrics.clone()).unwrap();
        let counts = || {
            let count = |outcome| {
                metrics
                    .listeners
                    .admin_token_reloads
                    .get_or_create(&OutcomeLabel { outcome })
                    .get()
            };
            (count("applied"), count("invalid"))
        };
        for (content, admitted, counted) in [
            ("one", "one", (0, 0)),
            (" \n", "one", (0, 1)),
            ("\n", "one", (0, 1)),
            ("a b", "one", (0, 1)),
            ("two", "two", (1, 1)),
        ] {
            std::fs::write(&path, content).unwrap();
            token.reload();
            assert!(
                token.is_authorized(&headers(&[&format!("Bearer {admitted}")])),
                "{content:?}"
            );
            assert_eq!(counts(), counted, "{content:?}");
        }
        assert!(
            !token.is_authorized(&headers(&["Bearer one"])),
            "the previous token is rejected"
        );
        std::fs::remove_file(&path).unwrap();
        token.reload();
        assert!(token.is_authorized(&headers(&["Bearer two"])));
        assert_eq!(counts(), (1, 2));
    }
}
