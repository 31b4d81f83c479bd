//! Bearer token for engines, read from a file that may be replaced at any time. While the token is
//! in use, the file is checked at most once a second. After an engine rejects the token, the file
//! is read at once. No file notification is needed.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use reqwest::header::HeaderValue;
use tracing::warn;
use warmroute_runtime::files;
use warmroute_settings::MAX_SECRET_FILE;

/// Minimum time between two checks of the file.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct BearerToken {
    path: PathBuf,
    state: Mutex<TokenState>,
}

#[derive(Default)]
struct TokenState {
    value: Option<HeaderValue>,
    /// Size and modification time of the file when it was read.
    file_stamp: Option<(u64, SystemTime)>,
    checked_at: Option<Instant>,
    last_error: Option<String>,
}

impl std::fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bearer")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl BearerToken {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            state: Mutex::default(),
        }
    }

    /// Returns the authorization header, if there is a usable token.
    pub(super) async fn header(&self) -> Option<HeaderValue> {
        let fresh = {
            let state = self.state.lock();
            state
                .checked_at
                .is_some_and(|checked| checked.elapsed() < CHECK_INTERVAL)
                .then(|| state.value.clone())
        };
        match fresh {
            Some(value) => value,
            None => {
                self.refresh().await;
                self.state.lock().value.clone()
            }
        }
    }

    /// Reads the file again. Returns true if the token changed.
    pub(super) async fn reload(&self) -> bool {
        let before = self.state.lock().value.clone();
        self.state.lock().file_stamp = None;
        self.refresh().await;
        let state = self.state.lock();
        state.value.is_some() && state.value != before
    }

    async fn refresh(&self) {
        let stamp = tokio::fs::metadata(&self.path).await.ok();
        let stamp = stamp.and_then(|metadata| Some((metadata.len(), metadata.modified().ok()?)));
        {
            let mut state = self.state.lock();
            state.checked_at = Some(Instant::now());
            if stamp.is_some() && state.file_stamp == stamp {
                return;
            }
        }
        let read = files::read(&self.path, MAX_SECRET_FILE)
            .await
            .map_err(|error| error.to_string());
        let value = read.and_then(|text| bearer_header(&text));
        let mut state = self.state.lock();
        match value {
            Ok(value) => {
                state.value = Some(value);
                state.file_stamp = stamp;
                state.last_error = None;
            }
            Err(error) => {
                if state.last_error.as_ref() != Some(&error) {
                    warn!(file = %self.path.display(), error, "engine token file not usable; the current token stays in use");
                }
                state.last_error = Some(error);
            }
        }
    }
}

fn bearer_header(text: &[u8]) -> Result<HeaderValue, String> {
    let token = text.trim_ascii();
    if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
        return Err("it is not one line of printable ASCII characters".into());
    }
    let mut value = HeaderValue::from_bytes(&[b"Bearer ", token].concat())
        .map_err(|error| error.to_string())?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changed_token_is_reloaded_and_never_displayed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let bearer = BearerToken::new(path.clone());
        assert_eq!(bearer.header().await, None);
        std::fs::write(&path, "one\n").unwrap();
        assert!(bearer.reload().await);
        assert_eq!(bearer.header().await.unwrap(), "Bearer one");
        assert!(!bearer.reload().await, "the token is unchanged");
        std::fs::write(&path, "t w o").unwrap();
        assert!(!bearer.reload().await, "not a valid token");
        assert_eq!(bearer.header().await.unwrap(), "Bearer one");
        std::fs::write(&path, "secret").unwrap();
        assert!(bearer.reload().await);
        let shown = format!("{bearer:?} {:?}", bearer.header().await);
        assert!(!shown.contains("secret"), "{shown}");
    }
}
