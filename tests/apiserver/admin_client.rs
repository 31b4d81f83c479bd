//! HTTP client of a cluster administrator, independent of the client under test.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use reqwest::{Method, StatusCode};
use serde_json::Value;

const JSON: &str = "application/json";

/// A client with all rights in the cluster.
#[derive(Clone, Debug)]
pub(crate) struct AdminClient {
    http: reqwest::Client,
    base: String,
    token: String,
}

/// Returns the path of the objects of one kind, in a namespace or cluster-wide.
pub(crate) fn collection(api: &str, namespace: Option<&str>, plural: &str) -> String {
    let root = if api.contains('/') { "apis" } else { "api" };
    match namespace {
        Some(namespace) => format!("/{root}/{api}/namespaces/{namespace}/{plural}"),
        None => format!("/{root}/{api}/{plural}"),
    }
}

impl AdminClient {
    pub(crate) fn new(port: u16, authority: &str, token: &str) -> anyhow::Result<Self> {
        let authority = reqwest::Certificate::from_pem(authority.as_bytes())?;
        let http = warmroute_runtime::tls::http_client_builder()
            .tls_certs_only([authority])
            .timeout(Duration::from_secs(30))
            .build()?;
        Ok(Self {
            http,
            base: format!("https://127.0.0.1:{port}"),
            token: token.to_owned(),
        })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        content: (&str, String),
    ) -> anyhow::Result<(StatusCode, Value)> {
        let request = self
            .http
            .request(method.clone(), format!("{}{path}", self.base))
            .bearer_auth(&self.token);
        let request = if content.1.is_empty() {
            request
        } else {
            request.header("content-type", content.0).body(content.1)
        };
        let response = request
            .send()
            .await
            .with_context(|| format!("{method} {path}"))?;
        let status = response.status();
        let text = response.text().await?;
        Ok((
            status,
            serde_json::from_str(&text).unwrap_or(Value::String(text)),
        ))
    }

    async fn expect(
        &self,
        method: Method,
        path: &str,
        content: (&str, String),
    ) -> anyhow::Result<Value> {
        let (status, body) = self.send(method.clone(), path, content).await?;
        ensure!(status.is_success(), "{method} {path}: {status} {body}");
        Ok(body)
    }

    /// Returns status and body. Fails only if there is no response.
    pub(crate) async fn try_get(&self, path: &str) -> anyhow::Result<(StatusCode, Value)> {
        self.send(Method::GET, path, (JSON, String::new())).await
    }

    pub(crate) async fn create(&self, path: &str, object: &Value) -> anyhow::Result<Value> {
        self.expect(Method::POST, path, (JSON, object.to_string()))
            .await
    }

    /// Returns the status of a creation that the API server may reject.
    pub(crate) async fn try_create(
        &self,
        path: &str,
        object: &Value,
    ) -> anyhow::Result<StatusCode> {
        Ok(self
            .send(Method::POST, path, (JSON, object.to_string()))
            .await?
            .0)
    }

    pub(crate) async fn patch(&self, path: &str, change: &Value) -> anyhow::Result<Value> {
        self.expect(
            Method::PATCH,
            path,
            ("application/merge-patch+json", change.to_string()),
        )
        .await
    }

    /// Applies an object with strict validation, as `kubectl apply --server-side` does.
    pub(crate) async fn apply(&self, path: &str, yaml: &str) -> anyhow::Result<Value> {
        let path = format!("{path}?fieldManager=test&force=true&fieldValidation=Strict");
        self.expect(
            Method::PATCH,
            &path,
            ("application/apply-patch+yaml", yaml.to_owned()),
        )
        .await
    }

    pub(crate) async fn delete(&self, path: &str) -> anyhow::Result<Value> {
        self.expect(Method::DELETE, path, (JSON, String::new()))
            .await
    }
}
