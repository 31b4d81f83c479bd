//! The token that the pages ask for. Only its hash is kept, and hashes are compared in constant time, so that neither a dump
//! of our memory nor a clock tells it. Probes ask for nothing: an orchestrator has no token.

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

use crate::metrics::{Metrics, OutcomeLabel};
use crate::tls::Secret;

/// Pages that everybody may see.
const PROBES: [&str; 2] = ["/healthz", "/readyz"];

/// A token out of a file, read again when that changes.
pub struct Token {
    path: PathBuf,
    hash: ArcSwap<blake3::Hash>,
    /// What was wrong with the file when it was last read.
    trouble: Mutex<Option<String>>,
    metrics: Arc<Metrics>,
}

impl Token {
    /// Reads the file; what is wrong with it, where it cannot be used.
    pub fn load(path: PathBuf, metrics: Arc<Metrics>) -> Result<Arc<Self>, String> {
        let hash = ArcSwap::from_pointee(Self::read(&path)?);
        Ok(Arc::new(Self {
            path,
            hash,
            trouble: Mutex::new(None),
            metrics,
        }))
    }

    pub(super) fn read(path: &Path) -> Result<blake3::Hash, String> {
        let text = std::fs::read(path)
            .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
        let token = text.trim_ascii();
        if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
            return Err(format!(
                "{} is not one line of letters, digits and signs; put a token there",
                path.display()
            ));
        }
        Ok(blake3::hash(token))
    }

    /// Whether a request has it.
    fn admits(&self, headers: &HeaderMap) -> bool {
        let mut given = headers.get_all(header::AUTHORIZATION).iter();
        // Of two, nobody can say which one is meant.
        let (Some(value), None) = (given.next(), given.next()) else {
            return false;
        };
        let Some((scheme, token)) = value.as_bytes().split_at_checked("Bearer ".len()) else {
            return false;
        };
        scheme.eq_ignore_ascii_case(b"Bearer ")
            && blake3::hash(token.trim_ascii()) == **self.hash.load()
    }

    fn count(&self, outcome: &'static str) {
        self.metrics
            .admin_token_reloads
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }
}

impl Secret for Token {
    fn files(&self) -> Vec<PathBuf> {
        vec![self.path.clone()]
    }

    fn reload(&self) {
        let mut trouble = self.trouble.lock();
        match Self::read(&self.path) {
            Ok(hash) => {
                *trouble = None;
                if hash != **self.hash.load() {
                    self.hash.store(Arc::new(hash));
                    self.count("applied");
                    info!("new token for the admin pages in use");
                }
            }
            Err(error) => {
                if trouble.as_ref() != Some(&error) {
                    warn!(
                        error,
                        "token for the admin pages not usable; the one in use is kept"
                    );
                    self.count("invalid");
                }
                *trouble = Some(error);
            }
        }
    }
}

/// The same pages, for those who have the token.
pub fn protect(routes: Routes, token: Arc<Token>) -> Routes {
    routes.layer(middleware::from_fn_with_state(token, check))
}

async fn check(State(token): State<Arc<Token>>, request: Request, next: Next) -> Response {
    if PROBES.contains(&request.uri().path()) || token.admits(request.headers()) {
        return next.run(request).await;
    }
    (
        StatusCode::UNAUTHORIZED,
        [(header::WWW_AUTHENTICATE, "Bearer")],
        "this page asks for the token\n",
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        values
            .iter()
            .map(|value| (header::AUTHORIZATION, value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn only_the_token_admits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "s3cret\n").unwrap();
        let token = Token::load(path.clone(), Arc::new(Metrics::new())).unwrap();
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
            assert_eq!(token.admits(&headers(given)), admitted, "{given:?}");
        }
    }

    #[test]
    fn a_new_token_replaces_the_old_one_and_an_unusable_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let metrics = Arc::new(Metrics::new());
        assert!(
            Token::load(path.clone(), metrics.clone()).is_err(),
            "there is no file"
        );
        std::fs::write(&path, "one").unwrap();
        let token = Token::load(path.clone(), metrics.clone()).unwrap();
        let counts = || {
            let count = |outcome| {
                metrics
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
                token.admits(&headers(&[&format!("Bearer {admitted}")])),
                "{content:?}"
            );
            assert_eq!(counts(), counted, "{content:?}");
        }
        assert!(
            !token.admits(&headers(&["Bearer one"])),
            "the old one is worth nothing"
        );
        std::fs::remove_file(&path).unwrap();
        token.reload();
        assert!(token.admits(&headers(&["Bearer two"])));
        assert_eq!(counts(), (1, 2));
    }
}
