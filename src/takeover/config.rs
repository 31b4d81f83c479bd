//! Settings of the start with what is known already.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tonic::transport::Endpoint;

use crate::settings::{Period, Problem};
use crate::tls::ClientFiles;

/// `takeover:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeoverConfig {
    /// The service (`api`) of another one that is ready: `http://host:port`, or `https://`. A name may stand for several.
    #[serde(default)]
    pub from: Option<String>,
    /// Who may vouch for it, PEM; whom this system trusts where left out.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// Our certificate, PEM, where it wants one.
    #[serde(default)]
    pub cert_file: Option<PathBuf>,
    /// Its key, PEM.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    /// From the start on so long it is asked, and so long we are not ready.
    #[serde(default = "deadline")]
    pub deadline: Period,
    /// What happens after that.
    #[serde(default)]
    pub late: Late,
    /// Where what is known is written at the end, and read at the start for whatever nobody else tells.
    #[serde(default)]
    pub file: Option<PathBuf>,
    /// A file that is older is not read.
    #[serde(default = "max_age")]
    pub max_age: Period,
}

/// What happens when nobody has told what is known until the deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Late {
    /// We start with the file, or cold: what engines still repeat is learned from them.
    #[default]
    Cold,
    /// We are not ready before somebody has told.
    Wait,
}

fn is_service(address: &str) -> bool {
    let scheme = ["http://", "https://"]
        .iter()
        .any(|scheme| address.starts_with(scheme));
    scheme && Endpoint::from_shared(address.to_owned()).is_ok()
}

fn deadline() -> Period {
    Period::seconds(10)
}

fn max_age() -> Period {
    Period::seconds(300)
}

impl TakeoverConfig {
    /// Makes names of files absolute.
    pub fn resolve(&mut self, folder: &Path) {
        let files = [
            &mut self.ca_file,
            &mut self.cert_file,
            &mut self.key_file,
            &mut self.file,
        ];
        for file in files.into_iter().flatten() {
            *file = folder.join(&*file);
        }
    }

    /// Mistakes of meaning, where event sources are waited for so long.
    pub fn problems(&self, sources: Duration) -> Vec<Problem> {
        let mut problems = self.files().problems(
            self.from
                .as_ref()
                .is_some_and(|from| from.starts_with("https://")),
        );
        match &self.from {
            None if self.file.is_none() => {
                problems.push(Problem::of(
                    "from",
                    "neither `from` nor `file` says where what is known is to be had",
                ));
            }
            None if self.late == Late::Wait => {
                problems.push(Problem::of(
                    "late",
                    "`wait` waits for another one, which `from` has to name",
                ));
            }
            Some(from) if !is_service(from) => {
                let text = format!(
                    "`{from}` is no address of a service; write for example http://warmroute:9903"
                );
                problems.push(Problem::of("from", text));
            }
            _ => {}
        }
        if self.from.is_some() && self.deadline.get() >= sources {
            let text = format!(
                "no time would be left to go on in the events: give less than readiness.event_sources_deadline, {}",
                humantime::format_duration(sources)
            );
            problems.push(Problem::of("deadline", text));
        }
        if let Some(folder) = self
            .file
            .as_ref()
            .and_then(|file| file.parent())
            .filter(|folder| !folder.is_dir())
        {
            problems.push(Problem::of(
                "file",
                format!("there is no folder {}", folder.display()),
            ));
        }
        problems
    }

    /// The files for TLS.
    pub(super) fn files(&self) -> ClientFiles<'_> {
        ClientFiles {
            ca: self.ca_file.as_ref(),
            cert: self.cert_file.as_ref(),
            key: self.key_file.as_ref(),
        }
    }
}
