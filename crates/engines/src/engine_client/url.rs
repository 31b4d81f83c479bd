//! Base URL of an engine. It may have a path, because engines may run behind a path prefix.

use std::fmt;
use std::str::FromStr;

use reqwest::Url;

use warmroute_core::worker::WorkerEndpoint;

/// Base URL of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineUrl(Url);

impl EngineUrl {
    /// Returns the URL of a worker over plain HTTP.
    pub fn http(endpoint: WorkerEndpoint) -> Self {
        Self::with_scheme("http", endpoint)
    }

    /// Returns the URL of a worker over TLS.
    pub fn https(endpoint: WorkerEndpoint) -> Self {
        Self::with_scheme("https", endpoint)
    }

    fn with_scheme(scheme: &str, endpoint: WorkerEndpoint) -> Self {
        let url = Url::parse(&format!("{scheme}://{endpoint}/"));
        // Parsing fails only for an IPv6 zone, which `SocketAddr` displays unless it is 0.
        Self(url.unwrap_or_else(|_| url_without_zone(scheme, endpoint)))
    }

    /// Returns the URL of a path below the base.
    pub(super) fn join(&self, path: &str) -> Url {
        let mut url = self.0.clone();
        let base = url.path().trim_end_matches('/').to_owned();
        url.set_path(&format!("{base}/{path}"));
        url
    }
}

/// Returns the URL of an endpoint without its IPv6 zone.
fn url_without_zone(scheme: &str, endpoint: WorkerEndpoint) -> Url {
    let address = std::net::SocketAddr::new(endpoint.0.ip(), endpoint.0.port());
    Url::parse(&format!("{scheme}://{address}/"))
        .expect("an address without a zone is a URL's host")
}

impl FromStr for EngineUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url = Url::parse(text)
            .ok()
            .filter(|url| ["http", "https"].contains(&url.scheme()) && url.has_host());
        url.map(Self).ok_or_else(|| {
            format!(
                "`{text}` is not an http:// or https:// address; write for example \
                http://10.0.0.7:8000"
            )
        })
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str().trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_appended_to_the_address() {
        for (address, expected) in [
            ("http://10.0.0.7:8000", "http://10.0.0.7:8000/tokenize"),
            (
                "https://engine.example/vllm/",
                "https://engine.example/vllm/tokenize",
            ),
            ("http://[::1]:80/a", "http://[::1]/a/tokenize"),
        ] {
            assert_eq!(
                address
                    .parse::<EngineUrl>()
                    .unwrap()
                    .join("tokenize")
                    .as_str(),
                expected
            );
        }
        for endpoint in ["10.0.0.7:8000", "[fe80::1%3]:8000", "[::1]:8000"] {
            let url = EngineUrl::http(endpoint.parse().unwrap());
            assert_eq!(url.join("v1/models").path(), "/v1/models", "{endpoint}");
        }
    }

    #[test]
    fn invalid_address_is_reported() {
        for text in [
            "",
            "10.0.0.7:8000",
            "ftp://x",
            "http://",
            "tcp://10.0.0.7:1",
        ] {
            assert!(
                text.parse::<EngineUrl>()
                    .unwrap_err()
                    .contains("http://10.0.0.7:8000"),
                "{text}"
            );
        }
    }
}
