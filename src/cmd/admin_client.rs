//! HTTP client of the admin pages of a running process.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use reqwest::{Client, ClientBuilder, RequestBuilder, StatusCode};
use serde_json::Value;
use warmroute_runtime::causes::innermost_cause;
use warmroute_settings::{MAX_SECRET_FILE, read_regular_file};

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
            read_regular_file(file, MAX_SECRET_FILE)
                .map_err(anyhow::Error::new)
                .and_then(|text| Ok(String::from_utf8(text)?))
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
        let cause = innermost_cause(error);
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
            "{}: {text}; check that warmroute is running and that --admin is its \
            listeners.admin.address{certificate}",
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
        if status.is_success() {
            Ok(text)
        } else {
            Err(self.describe_failure(page, status, &text))
        }
    }

    /// Describes a response with an error status.
    fn describe_failure(&self, page: &str, status: StatusCode, text: &str) -> anyhow::Error {
        let url = self.url(page);
        let message: Value = serde_json::from_str(text).unwrap_or_default();
        let error = message["error"].as_str();
        if status != StatusCode::NOT_FOUND {
            return anyhow!("{url} returned {status}: {}", error.unwrap_or(text));
        }
        // Only warmroute refers to its list of pages.
        if let (Some(error), true) = (error, message["pages"].is_string()) {
            return anyhow!(
                "{url}: {error} (the running process may have another version than this command)"
            );
        }
        let owner = if text.contains("Admin home page") || text.contains("admin commands") {
            " (it is probably that of Envoy)"
        } else {
            ""
        };
        anyhow!(
            "{} is not the admin address of warmroute{owner}; it is configured as \
            listeners.admin.address",
            self.admin
        )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_page_is_distinguished_from_other_server() {
        let client = AdminClient::new("http://127.0.0.1:1", None, None).unwrap();
        let own = r#"{"error": "there is no such page; / lists all pages", "pages": "/"}"#;
        for (status, text, part) in [
            (404, own, "/debug/audit: there is no such page"),
            (404, "admin commands are: ..", "probably that of Envoy"),
            (404, "", "is not the admin address of warmroute;"),
            (404, r#"{"error": "x"}"#, "is not the admin address"),
            (
                503,
                r#"{"error": "loading"}"#,
                "503 Service Unavailable: loading",
            ),
            (500, "panic", "500 Internal Server Error: panic"),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            let error = client.describe_failure("/debug/audit", status, text);
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
