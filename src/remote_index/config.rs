//! Settings of the index that is asked for elsewhere.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem, Step};
use crate::tls::ClientFiles;

/// `use_remote_index:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteIndexConfig {
    /// The services (`api`) of those that serve it: `http://host:port`, or `https://`.
    pub servers: Vec<String>,
    /// How long a request waits for the answer; then it is routed by what was routed before.
    #[serde(default = "deadline")]
    pub deadline: Period,
    /// After how long another server is asked as well; none: never.
    #[serde(default = "hedge")]
    pub hedge: Option<Period>,
    /// Questions under way at once; further requests go without.
    #[serde(default = "in_flight")]
    pub in_flight: u32,
    /// Who may vouch for the servers, PEM; whom this system trusts where left out.
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    /// Our certificate, PEM, where they want one.
    #[serde(default)]
    pub cert_file: Option<PathBuf>,
    /// Its key, PEM.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
}

fn deadline() -> Period {
    Period::millis(10)
}

#[expect(clippy::unnecessary_wraps, reason = "the default of an optional key")]
fn hedge() -> Option<Period> {
    Some(Period::millis(3))
}

fn in_flight() -> u32 {
    256
}

impl RemoteIndexConfig {
    /// The usual limits with these servers.
    pub fn of(servers: impl IntoIterator<Item = String>) -> Self {
        Self {
            servers: servers.into_iter().collect(),
            deadline: deadline(),
            hedge: hedge(),
            in_flight: in_flight(),
            ca_file: None,
            cert_file: None,
            key_file: None,
        }
    }

    /// Makes names of files absolute.
    pub fn resolve(&mut self, folder: &Path) {
        for file in [&mut self.ca_file, &mut self.cert_file, &mut self.key_file]
            .into_iter()
            .flatten()
        {
            *file = folder.join(&*file);
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.problems_of_servers();
        if self.deadline.get().is_zero() {
            problems.push(Problem::of(
                "deadline",
                "no answer could come within 0s; the default is 10ms",
            ));
        }
        let in_vain = |hedge: &Period| *hedge >= self.deadline && !self.deadline.get().is_zero();
        if let Some(hedge) = self.hedge.filter(in_vain) {
            let text = format!(
                "{hedge} is not less than `deadline` ({}), so nobody would ever be asked as well; the default is 3ms, and \
                 `null` asks one server only",
                self.deadline
            );
            problems.push(Problem::of("hedge", text));
        }
        if self.in_flight == 0 {
            let text = "no question would ever be asked; the default is 256";
            problems.push(Problem::of("in_flight", text));
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
                "there is nobody to ask; name at least one, such as http://index-0:9903",
            ));
        }
        let mut seen = HashSet::new();
        for (at, server) in self.servers.iter().enumerate() {
            let is_written_so = ["http://", "https://"]
                .iter()
                .any(|scheme| server.starts_with(scheme));
            let url = reqwest::Url::parse(server).ok();
            if !is_written_so || !url.is_some_and(|url| url.has_host() && url.path() == "/") {
                let text = format!(
                    "`{server}` is no address of a service; write for example http://index-0:9903"
                );
                problems.push(Problem::at([Step::from("servers"), at.into()], text));
            } else if !seen.insert(server) {
                let text =
                    format!("`{server}` is there already, and would be asked twice; leave one out");
                problems.push(Problem::at([Step::from("servers"), at.into()], text));
            }
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
