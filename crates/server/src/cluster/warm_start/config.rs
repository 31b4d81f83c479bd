//! Configuration of the warm start.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tonic::transport::Endpoint;

use warmroute_runtime::tls::ClientFiles;
use warmroute_settings::{DurationSetting, Problem};

/// The section `index.warm_start:`: initial index and learned latency at startup. The index
/// includes blocks that engines no longer replay. Both are copied from another ready replica, or
/// read from the files that the previous process wrote at shutdown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WarmStartConfig {
    /// API address of a ready warmroute process: `http://host:port` or `https://host:port`. The
    /// name may resolve to several processes.
    #[serde(default)]
    pub url: Option<String>,
    /// CA certificates (PEM) that verify the peer. Default: the CAs of the system.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// Client certificate (PEM), if the peer requires one.
    #[serde(default)]
    pub cert_file: Option<PathBuf>,
    /// Private key of the client certificate (PEM).
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    /// Maximum duration of the warm start, during which the process is not ready.
    #[serde(default = "timeout")]
    pub timeout: DurationSetting,
    /// Behavior if the peer has not responded within `timeout`.
    #[serde(default)]
    pub on_timeout: DeadlineAction,
    /// Snapshot file. It is written at shutdown, and read at startup for ranks that cannot be
    /// copied from the peer, unless it is older than 5 minutes. The learned latency is in
    /// `<snapshot_file>.latency.json`.
    #[serde(default)]
    pub snapshot_file: Option<PathBuf>,
}

/// Behavior if the peer has not responded by the deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeadlineAction {
    /// Start with the snapshot file, or with a cold index.
    #[default]
    Cold,
    /// Wait for the peer without limit; the process is not ready during this time.
    Wait,
}

fn is_service(address: &str) -> bool {
    let scheme = ["http://", "https://"]
        .iter()
        .any(|scheme| address.starts_with(scheme));
    scheme && Endpoint::from_shared(address.to_owned()).is_ok()
}

fn timeout() -> DurationSetting {
    DurationSetting::seconds(10)
}

impl WarmStartConfig {
    /// Returns the semantic errors of the configuration. `sources_timeout` is the startup timeout
    /// of the event sources.
    pub fn problems(&self, sources_timeout: Duration) -> Vec<Problem> {
        let mut problems = self.files().problems(
            self.url
                .as_ref()
                .is_some_and(|url| url.starts_with("https://")),
        );
        match &self.url {
            None if self.snapshot_file.is_none() => {
                problems.push(Problem::of(
                    "url",
                    "neither `url` nor `snapshot_file` is set",
                ));
            }
            None if self.on_timeout == DeadlineAction::Wait => {
                problems.push(Problem::of("on_timeout", "`wait` requires `url`"));
            }
            Some(url) if !is_service(url) => {
                let text = format!(
                    "`{url}` is not the address of a service; write for example \
                    http://warmroute:9903"
                );
                problems.push(Problem::of("url", text));
            }
            _ => {}
        }
        if self.url.is_some() && self.timeout.get() >= sources_timeout {
            let text = format!(
                "no time would be left to connect the event sources; set less than \
                readiness.event_sources_timeout, {}",
                humantime::format_duration(sources_timeout)
            );
            problems.push(Problem::of("timeout", text));
        }
        if let Some(directory) = self
            .snapshot_file
            .as_ref()
            .and_then(|file| file.parent())
            .filter(|directory| !directory.is_dir())
        {
            problems.push(Problem::of(
                "snapshot_file",
                format!("the directory {} does not exist", directory.display()),
            ));
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
