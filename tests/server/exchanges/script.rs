//! File format of a transcript.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

/// One file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExchangeScript {
    /// The row of the table: section, then name.
    pub(crate) row: String,
    /// Intended difference from the reference, and its reason.
    #[serde(default)]
    pub(crate) differs: Option<String>,
    /// The configuration; listeners are added. `workers` is written to a file, so that it may be
    /// empty, and may change.
    pub(crate) config: Value,
    /// The steps, in order.
    pub(crate) steps: Vec<ScriptStep>,
}

/// An action or a check.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, untagged)]
pub(crate) enum ScriptStep {
    /// Messages on a stream, and all replies to them.
    Send(SendStep),
    /// The end of a stream.
    End {
        #[serde(default = "main")]
        on: String,
        end: StreamEnd,
    },
    /// All returned bytes of a body.
    Returned {
        #[serde(default = "main")]
        on: String,
        returned: ReturnedBody,
    },
    /// Starts this number of exchanges at each endpoint, which hold load there until the end of the
    /// script.
    Busy { busy: BTreeMap<String, u32> },
    /// Replaces the list of workers.
    Workers { workers: Vec<Value> },
    /// `/debug/load`, by worker rank. Other ranks are not compared.
    Load { load: BTreeMap<String, Value> },
    /// Series of `/metrics`. A missing one is 0.
    Metrics { metrics: BTreeMap<String, f64> },
    /// `/readyz`.
    Ready { ready: bool },
    /// gRPC health, by service.
    Health { health: BTreeMap<String, String> },
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SendStep {
    /// The stream, which is opened by its first messages.
    #[serde(default = "main")]
    pub(crate) on: String,
    /// gRPC metadata of a new stream.
    #[serde(default)]
    pub(crate) opening: BTreeMap<String, String>,
    /// The messages. `${exchange}` is replaced by the key of the last exchange with a probe filter.
    pub(crate) send: Vec<Value>,
    pub(crate) replies: Vec<Value>,
}

/// End of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StreamEnd {
    /// The gateway half-closes the stream and reads the remaining replies.
    Close,
    /// The gateway resets the stream.
    Abort,
    /// The server ends the stream.
    ByUs,
}

/// All bytes of one direction.
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

/// The folder of the transcripts.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/exchanges")
}

impl ExchangeScript {
    /// Every transcript with the name of its file.
    pub(crate) fn all() -> Vec<(String, Self)> {
        let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let paths = fs::read_dir(folder())
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
