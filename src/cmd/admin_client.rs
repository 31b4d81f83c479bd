//! HTTP client of the admin pages of a running process.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use reqwest::{Client, ClientBuilder, RequestBuilder, StatusCode};
use serde_json::Value;

/// Timeout of a request. Explaining a long prompt on a busy process takes seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Client of one process.
pub(super) struct AdminClient {
    client: Client,
    admin: String,
    token: Option<String>,
}

impl AdminClient {
    /// Creates a client for the admin URL of a process, with optional token and CA files.
    pub(super) fn new(
        admin: &str,
        token_file: Option<&Path>,
        ca_file: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let read = |file: &Path| {
            std::fs::read_to_string(file)
                .with_context(|| format!("--token-file {}", file.display()))
        };
        let token = token_file
            .map(read)
            .transpose()?
            .map(|token| token.trim().to_owned());
        let client = client_builder(admin, ca_file)?
            .timeout(REQUEST_TIMEOUT)
            .build()?;
        Ok(Self {
            client,
            admin: admin.trim_end_matches('/').to_owned(),
            token,
        })
    }

    /// Returns the text of a page.
    pub(super) async fn get(&self, page: &str) -> anyhow::Result<String> {
        self.send(self.client.get(self.url(page)), page).await
    }

    /// Posts JSON and returns the text of the response.
    pub(super) async fn post(
        &self,
        page: &str,
        body: String,
        accept: &str,
    ) -> anyhow::Result<String> {
        let request = self
            .client
            .post(self.url(page))
            .header("content-type", "application/json");
        self.send(request.header("accept", accept).body(body), page)
            .await
    }

    fn url(&self, page: &str) -> String {
        format!("{}{page}", self.admin)
    }

    /// Describes a failed connection by its innermost cause.
    fn unreachable(&self, error: &reqwest::Error) -> anyhow::Error {
        let mut cause: &dyn std::error::Error = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        let text = match cause
            .downcast_ref::<std::io::Error>()
            .map(std::io::Error::kind)
        {
            Some(std::io::ErrorKind::ConnectionRefused) => "connection refused".to_owned(),
            _ if error.is_timeout() => "no response".to_owned(),
            _ => cause.to_string(),
        };
        let certificate = if self.admin.starts_with("https:") {
            "; for a private certificate authority, set --ca-file"
        } else {
            ""
        };
        anyhow!(
            "{}: {text}; check that warmroute is running and that --admin is its listeners.admin.address{certificate}",
            self.admin
        )
    }

    async fn send(&self, mut request: RequestBuilder, page: &str) -> anyhow::Result<String> {
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        let url = self.url(page);
        let response = request
            .send()
            .await
            .map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        let text = response.text().await.with_context(|| {
            format!(
                "{url} closed the connection before the end of the \
            response"
            )
        })?;
        if status == StatusCode::NOT_FOUND {
            let owner = if text.contains("Admin home page") || text.contains("admin commands") {
                " (it is probably that of Envoy)"
            } else {
                ""
            };
            bail!(
                "{} is not the admin address of warmroute{owner}; it is configured as listeners.admin.address",
                self.admin
            );
        }
        if !status.is_success() {
            let message = serde_json::from_str::<Value>(&text)
                .ok()
                .and_then(|message| Some(message["error"].as_str()?.to_owned()));
            bail!("{url} returned {status}: {}", message.unwrap_or(text));
        }
        Ok(text)
    }
}

/// Returns a client builder for an admin URL. Without TLS the CA certificates of the system are not
/// loaded, because the system may have none.
pub(super) fn client_builder(url: &str, ca_file: Option<&Path>) -> anyhow::Result<ClientBuilder> {
    if url.starts_with("https:") || ca_file.is_some() {
        warmroute_runtime::tls::http_client_with_ca(ca_file)
    } else {
        Ok(warmroute_runtime::tls::http_client_builder())
    }
}

/// Formats JSON with indentation.
pub(super) fn pretty_json(value: &Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
