//! Configuration of the remote index client (section `index.remote:`).

use std::collections::HashSet;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_runtime::tls::ClientFiles;
use warmroute_settings::{DurationSetting, PathStep, Problem};

/// The section `index.remote:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoteIndexConfig {
    /// Addresses of the servers' `api` services: `http://host:port` or `https://host:port`.
    pub servers: Vec<String>,
    /// Maximum time that a request waits for a response. After that, it is routed by predictions. After
    /// 30 % of it, at most 100 ms, a second server is queried.
    #[serde(default = "timeout")]
    pub timeout: DurationSetting,
    /// CA certificates (PEM) that verify the servers. Default: the CAs of the system.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// Client certificate (PEM), if the servers require one.
    #[serde(default)]
    pub cert_file: Option<PathBuf>,
    /// Key of the client certificate (PEM).
    #[serde(default)]
    pub key_file: Option<PathBuf>,
}

fn timeout() -> DurationSetting {
    DurationSetting::millis(10)
}

impl RemoteIndexConfig {
    /// Returns a configuration with these servers and default limits.
    pub fn with_servers(servers: impl IntoIterator<Item = String>) -> Self {
        Self {
            servers: servers.into_iter().collect(),
            timeout: timeout(),
            ca_file: None,
            cert_file: None,
            key_file: None,
        }
    }

    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.problems_of_servers();
        if self.timeout.get().is_zero() {
            problems.push(Problem::of(
                "timeout",
                "every request would time out after 0s; the default is 10ms",
            ));
        }
        problems.extend(
            self.files().problems(
                self.servers
                    .iter()
                    .any(|server| server.starts_with("https://")),
            ),
        );
        problems
    }

    fn problems_of_servers(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.servers.is_empty() {
            problems.push(Problem::of(
                "servers",
                "at least one server is required, such as http://index-0:9903",
            ));
        }
        let mut seen = HashSet::new();
        for (index, server) in self.servers.iter().enumerate() {
            let has_scheme = ["http://", "https://"]
                .iter()
                .any(|scheme| server.starts_with(scheme));
            let url = reqwest::Url::parse(server).ok();
            if !has_scheme || !url.is_some_and(|url| url.has_host() && url.path() == "/") {
                let text = format!(
                    "`{server}` is no address of a service; write for example http://index-0:9903"
                );
                problems.push(Problem::at([PathStep::from("servers"), index.into()], text));
            } else if !seen.insert(server) {
                let text = format!("`{server}` is listed twice; remove one");
                problems.push(Problem::at([PathStep::from("servers"), index.into()], text));
            }
        }
        problems
    }

    /// Returns the TLS files of the client.
    pub(super) fn files(&self) -> ClientFiles<'_> {
        ClientFiles {
            ca: self.ca_file.as_ref(),
            cert: self.cert_file.as_ref(),
            key: self.key_file.as_ref(),
        }
    }
}
