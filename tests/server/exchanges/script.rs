//! File format of a transcript.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

/// A transcript file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExchangeScript {
    /// Row of the table: section, then name.
    pub(crate) row: String,
    /// Intended difference from the reference, with its reason.
    #[serde(default)]
    pub(crate) differs: Option<String>,
    /// Configuration of warmroute, without listeners. `workers` is written to a separate file, so
    /// that the list may be empty and may change.
    pub(crate) config: Value,
    /// Steps in the order of their execution.
    pub(crate) steps: Vec<ScriptStep>,
}

/// An action, or a check of its result.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, untagged)]
pub(crate) enum ScriptStep {
    /// Sends messages on a stream, and checks all replies.
    Send(SendStep),
    /// Ends a stream.
    End {
        #[serde(default = "main")]
        on: String,
        end: StreamEnd,
    },
    /// Checks all returned bytes of a body.
    Returned {
        #[serde(default = "main")]
        on: String,
        returned: ReturnedBody,
    },
    /// Starts this number of exchanges at each endpoint. They stay active until the end of the
    /// script.
    Busy { busy: BTreeMap<String, u32> },
    /// Replaces the list of workers.
    Workers { workers: Vec<Value> },
    /// Checks `/debug/load` by worker rank. Ranks that are not listed are not compared.
    Load { load: BTreeMap<String, Value> },
    /// Checks series of `/metrics`. A missing series is 0.
    Metrics { metrics: BTreeMap<String, f64> },
    /// Checks `/readyz`.
    Ready { ready: bool },
    /// Checks gRPC health by service.
    Health { health: BTreeMap<String, String> },
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SendStep {
    /// Name of the stream, which its first messages open.
    #[serde(default = "main")]
    pub(crate) on: String,
    /// gRPC metadata of the stream.
    #[serde(default)]
    pub(crate) opening: BTreeMap<String, String>,
    /// Messages. `${exchange}` is replaced by the key of the last exchange that has one.
    pub(crate) send: Vec<Value>,
    pub(crate) replies: Vec<Value>,
}

/// Side that ends a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StreamEnd {
    /// The gateway half-closes the stream and reads the remaining replies.
    Close,
    /// The gateway resets the stream.
    Abort,
    /// warmroute ends the stream.
    ByWarmroute,
}

/// Returned bytes by direction.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReturnedBody {
    #[serde(default)]
    pub(crate) request: Option<Value>,
    #[serde(default)]
    pub(crate) response: Option<Value>,
}

fn main() -> String {
    "main".to_owned()
}

/// Returns the directory of the transcripts.
pub(crate) fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/exchanges")
}

impl ExchangeScript {
    /// Returns every transcript with the name of its file.
    pub(crate) fn all() -> Vec<(String, Self)> {
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let paths = fs::read_dir(directory())
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let mut paths: Vec<_> = paths
            .filter(|path| name(path) != super::table::FILE)
            .collect();
        paths.sort();
        assert!(!paths.is_empty(), "there are no transcripts");
        paths
            .iter()
            .map(|path| (name(path), Self::read(path)))
            .collect()
    }

    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }
}
