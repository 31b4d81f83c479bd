//! A transcript as it is written.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

/// One file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Script {
    /// Which row it is of: section, then name.
    pub(crate) row: String,
    /// Where we mean to differ from the reference, and why.
    #[serde(default)]
    pub(crate) differs: Option<String>,
    /// The configuration; listeners are added. `workers` goes into a file, so that it may be empty, and change.
    pub(crate) config: Value,
    /// What happens, in order.
    pub(crate) steps: Vec<Step>,
}

/// Something that happens, or is looked at.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, untagged)]
pub(crate) enum Step {
    /// Messages on a stream, and all that is answered to them.
    Send(Send),
    /// The end of a stream.
    End {
        #[serde(default = "main")]
        on: String,
        end: End,
    },
    /// All bytes of a body together, as they came back from us.
    Returned {
        #[serde(default = "main")]
        on: String,
        returned: Returned,
    },
    /// So many exchanges are begun at each of these endpoints, and hold load there until the script ends.
    Busy { busy: BTreeMap<String, u32> },
    /// Another list of workers.
    Workers { workers: Vec<Value> },
    /// `/debug/load`, by worker rank; what is not named is not compared.
    Load { load: BTreeMap<String, Value> },
    /// Series of `/metrics`; one that is not there is 0.
    Metrics { metrics: BTreeMap<String, f64> },
    /// `/readyz`.
    Ready { ready: bool },
    /// gRPC health, by the name of the service.
    Health { health: BTreeMap<String, String> },
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Send {
    /// Which stream; it is opened by its first messages.
    #[serde(default = "main")]
    pub(crate) on: String,
    /// What is said when the stream is opened, as gRPC metadata.
    #[serde(default)]
    pub(crate) opening: BTreeMap<String, String>,
    /// `${exchange}` stands for the name that the last exchange with another filter beside it was given.
    pub(crate) send: Vec<Value>,
    pub(crate) replies: Vec<Value>,
}

/// How a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// The gateway has no more to say, and hears what is left.
    Close,
    /// The gateway is gone.
    Abort,
    /// We have ended it.
    ByUs,
}

/// All bytes of one direction.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Returned {
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

impl Script {
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
