//! The token that engines ask for, out of a file that somebody replaces now and then. The file is looked at again at most
//! once a second while it is needed, and at once when an engine refuses the token, so that nobody has to tell us.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use reqwest::header::HeaderValue;
use tracing::warn;

/// How long the file is not looked at again.
const REST: Duration = Duration::from_secs(1);

pub(super) struct Bearer {
    path: PathBuf,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    value: Option<HeaderValue>,
    /// What the file looked like when it was read.
    stamp: Option<(u64, SystemTime)>,
    looked: Option<Instant>,
    trouble: Option<String>,
}

impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bearer")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Bearer {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            held: Mutex::default(),
        }
    }

    /// The header, if there is a usable token.
    pub(super) async fn header(&self) -> Option<HeaderValue> {
        let fresh = {
            let held = self.held.lock();
            held.looked
                .is_some_and(|looked| looked.elapsed() < REST)
                .then(|| held.value.clone())
        };
        match fresh {
            Some(value) => value,
            None => {
                self.look().await;
                self.held.lock().value.clone()
            }
        }
    }

    /// Reads the file; whether there is another token than before.
    pub(super) async fn read_again(&self) -> bool {
        let before = self.held.lock().value.clone();
        self.held.lock().stamp = None;
        self.look().await;
        let held = self.held.lock();
        held.value.is_some() && held.value != before
    }

    async fn look(&self) {
        let stamp = tokio::fs::metadata(&self.path).await.ok();
        let stamp = stamp.and_then(|about| Some((about.len(), about.modified().ok()?)));
        {
            let mut held = self.held.lock();
            held.looked = Some(Instant::now());
            if stamp.is_some() && held.stamp == stamp {
                return;
            }
        }
        let read = tokio::fs::read(&self.path)
            .await
            .map_err(|error| error.to_string());
        let value = read.and_then(|text| header(&text));
        let mut held = self.held.lock();
        match value {
            Ok(value) => {
                held.value = Some(value);
                held.stamp = stamp;
                held.trouble = None;
            }
            Err(trouble) => {
                if held.trouble.as_ref() != Some(&trouble) {
                    warn!(file = %self.path.display(), trouble, "token for engines not usable; what was read before stays");
                }
                held.trouble = Some(trouble);
            }
        }
    }
}

fn header(text: &[u8]) -> Result<HeaderValue, String> {
    let token = text.trim_ascii();
    if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
        return Err("it is not one line of letters, digits and signs".into());
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
    async fn a_token_is_read_again_when_it_changed_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let bearer = Bearer::new(path.clone());
        assert_eq!(bearer.header().await, None);
        std::fs::write(&path, "one\n").unwrap();
        assert!(bearer.read_again().await);
        assert_eq!(bearer.header().await.unwrap(), "Bearer one");
        assert!(!bearer.read_again().await, "it is the same");
        std::fs::write(&path, "t w o").unwrap();
        assert!(!bearer.read_again().await, "no token");
        assert_eq!(bearer.header().await.unwrap(), "Bearer one");
        std::fs::write(&path, "secret").unwrap();
        assert!(bearer.read_again().await);
        let shown = format!("{bearer:?} {:?}", bearer.header().await);
        assert!(!shown.contains("secret"), "{shown}");
    }
}
