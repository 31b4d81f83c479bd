//! Configuration of the remote index client (section `index.remote:`).

use std::collections::HashSet;
use std::path::{Path, PathBuf};

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
    /// Maximum time that a request waits for a response. After that, it is routed by predictions.
    #[serde(default = "timeout")]
    pub timeout: DurationSetting,
    /// Time after which a second server is queried; `null` disables it.
    #[serde(default = "hedge_delay")]
    pub hedge_delay: Option<DurationSetting>,
    /// Maximum number of concurrent queries. Beyond it, requests are routed without a query.
    #[serde(default = "max_concurrency")]
    pub max_concurrency: u32,
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

#[expect(clippy::unnecessary_wraps, reason = "the default of an optional key")]
fn hedge_delay() -> Option<DurationSetting> {
    Some(DurationSetting::millis(3))
}

fn max_concurrency() -> u32 {
    256
}

impl RemoteIndexConfig {
    /// Returns a configuration with these servers and default limits.
    pub fn with_servers(servers: impl IntoIterator<Item = String>) -> Self {
        Self {
            servers: servers.into_iter().collect(),
            timeout: timeout(),
            hedge_delay: hedge_delay(),
            max_concurrency: max_concurrency(),
            ca_file: None,
            cert_file: None,
            key_file: None,
        }
    }

    /// Resolves file names relative to the directory of the configuration file.
    pub fn resolve(&mut self, directory: &Path) {
        for file in [&mut self.ca_file, &mut self.cert_file, &mut self.key_file]
            .into_iter()
            .flatten()
        {
            *file = directory.join(&*file);
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
        let is_useless =
            |hedge: &DurationSetting| *hedge >= self.timeout && !self.timeout.get().is_zero();
        if let Some(hedge) = self.hedge_delay.filter(is_useless) {
            let text = format!(
                "{hedge} is not less than `timeout` ({}), so no hedge would ever be sent; the default is 3ms, and \
                 `null` disables hedging",
                self.timeout
            );
            problems.push(Problem::of("hedge_delay", text));
        }
        if self.max_concurrency == 0 {
            let text = "no query would ever be sent; the default is 256";
            problems.push(Problem::of("max_concurrency", text));
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
