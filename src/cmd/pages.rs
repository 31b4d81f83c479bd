//! The admin pages of a running process, as commands ask them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use reqwest::{Client, ClientBuilder, RequestBuilder};
use serde_json::Value;

/// How long a running process may take; a long prompt on a busy one takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// The pages of one process.
pub(super) struct Pages {
    client: Client,
    admin: String,
    token: Option<String>,
}

impl Pages {
    /// The pages at `admin`, with the file of the token and that of the authority where they need these.
    pub(super) fn of(
        admin: &str,
        token_file: Option<&Path>,
        ca_file: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let read = |file: &Path| {
            std::fs::read_to_string(file).with_context(|| format!("the token {}", file.display()))
        };
        let token = token_file
            .map(read)
            .transpose()?
            .map(|token| token.trim().to_owned());
        let client = client(admin, ca_file)?.timeout(PATIENCE).build()?;
        Ok(Self {
            client,
            admin: admin.trim_end_matches('/').to_owned(),
            token,
        })
    }

    /// The text of a page.
    pub(super) async fn get(&self, page: &str) -> anyhow::Result<String> {
        self.ask(self.client.get(self.url(page)), page).await
    }

    /// The answer to a question in JSON.
    pub(super) async fn post(
        &self,
        page: &str,
        question: String,
        accept: &str,
    ) -> anyhow::Result<String> {
        let request = self
            .client
            .post(self.url(page))
            .header("content-type", "application/json");
        self.ask(request.header("accept", accept).body(question), page)
            .await
    }

    fn url(&self, page: &str) -> String {
        format!("{}{page}", self.admin)
    }

    async fn ask(&self, mut request: RequestBuilder, page: &str) -> anyhow::Result<String> {
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        let url = self.url(page);
        let answer = request.send().await.with_context(|| match url.starts_with("https:") {
            true => format!("{url} cannot be reached, or no trusted authority signed its certificate (--ca-file)"),
            false => format!("{url} cannot be reached"),
        })?;
        let status = answer.status();
        let text = answer
            .text()
            .await
            .with_context(|| format!("{url} broke off its answer"))?;
        if !status.is_success() {
            let said = serde_json::from_str::<Value>(&text)
                .ok()
                .and_then(|said| Some(said["error"].as_str()?.to_owned()));
            bail!("{url} answers {status}: {}", said.unwrap_or(text));
        }
        Ok(text)
    }
}

/// A client for an admin page. Without TLS no authority is needed, and the system may have none.
pub(super) fn client(url: &str, ca_file: Option<&Path>) -> anyhow::Result<ClientBuilder> {
    if url.starts_with("https:") || ca_file.is_some() {
        crate::tls::trusting(ca_file)
    } else {
        Ok(crate::tls::client())
    }
}

/// JSON for people.
pub(super) fn pretty(value: &Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
