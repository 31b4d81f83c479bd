//! Settings of replicas.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem, has_credentials};

/// `replicas:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicasConfig {
    /// The servers over which they talk.
    pub nats: NatsConfig,
    /// Replicas of one group serve the same workers and tell each other; others of the same servers do not.
    #[serde(default = "group")]
    pub group: String,
    /// What people call this one; the name of the host where left out.
    #[serde(default)]
    pub name: Option<String>,
    /// What is told is gathered for so long.
    #[serde(default = "batch")]
    pub batch: Period,
    /// What a peer has booked is forgotten when nothing was heard of it for so long.
    #[serde(default = "lease")]
    pub lease: Period,
    /// At the start, how long we are not ready while we do not know what the others have booked.
    #[serde(default = "wait")]
    pub wait: Period,
}

/// `replicas.nats:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NatsConfig {
    /// `nats://host:port`, or `tls://`; those of one cluster.
    pub servers: Vec<String>,
    /// Credentials as NATS issues them: a JWT and its seed.
    pub credentials_file: Option<PathBuf>,
    /// A token; read again whenever we connect.
    pub token_file: Option<PathBuf>,
    /// A user's name.
    pub user: Option<String>,
    /// That user's password; read again whenever we connect.
    pub password_file: Option<PathBuf>,
    /// Who may vouch for the servers, PEM; whom this system trusts where left out.
    pub ca_file: Option<PathBuf>,
    /// Our certificate, PEM, where the servers want one.
    pub cert_file: Option<PathBuf>,
    /// Its key, PEM.
    pub key_file: Option<PathBuf>,
}

fn group() -> String {
    "default".to_owned()
}

fn batch() -> Period {
    Period::millis(1)
}

fn lease() -> Period {
    Period::seconds(5)
}

fn wait() -> Period {
    Period::seconds(5)
}

impl ReplicasConfig {
    /// Makes names of files absolute.
    pub fn resolve(&mut self, folder: &Path) {
        self.nats.files().into_iter().for_each(|(_, file)| {
            if let Some(file) = file {
                *file = folder.join(&*file);
            }
        });
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self
            .nats
            .problems()
            .into_iter()
            .map(|problem| problem.within("nats"))
            .collect();
        let mut refuse = |key: &str, text: &str| problems.push(Problem::of(key, text));
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if self.group.is_empty() || !self.group.bytes().all(is_plain) {
            refuse(
                "group",
                "the group becomes part of a subject; write letters, digits, - and _ only",
            );
        }
        if self.batch.get() > std::time::Duration::from_secs(1) {
            refuse(
                "batch",
                "replicas would know of bookings too late to be of use; the default is 1ms, the most is 1s",
            );
        }
        if self.lease.get() < std::time::Duration::from_millis(200) {
            refuse(
                "lease",
                "a short pause would drop bookings that are alive; the default is 5s, the least is 200ms",
            );
        }
        problems
    }
}

impl NatsConfig {
    fn files(&mut self) -> [(&'static str, &mut Option<PathBuf>); 6] {
        let Self {
            credentials_file,
            token_file,
            password_file,
            ca_file,
            cert_file,
            key_file,
            ..
        } = self;
        [
            ("credentials_file", credentials_file),
            ("token_file", token_file),
            ("password_file", password_file),
            ("ca_file", ca_file),
            ("cert_file", cert_file),
            ("key_file", key_file),
        ]
    }

    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.servers.is_empty() {
            problems.push(Problem::of(
                "servers",
                "no server is given; write for example nats://nats:4222",
            ));
        }
        for (at, server) in self.servers.iter().enumerate() {
            if has_credentials(server) {
                let text = "a server's address is shown on pages, so it may not hold a password; give `user` and `password_file`, or `token_file`";
                problems.push(Problem::at(["servers".into(), at.into()], text));
            } else if let Err(error) = server.parse::<async_nats::ServerAddr>() {
                let text = format!(
                    "`{server}` is no server ({error}); write for example nats://nats:4222"
                );
                problems.push(Problem::at(["servers".into(), at.into()], text));
            }
        }
        for (key, file) in self.clone().files() {
            if let Some(file) = file.as_ref().filter(|file| !file.is_file()) {
                problems.push(Problem::of(
                    key,
                    format!("there is no file {}", file.display()),
                ));
            }
        }
        let pairs = [
            (
                "user",
                self.user.is_some(),
                "password_file",
                self.password_file.is_some(),
            ),
            (
                "cert_file",
                self.cert_file.is_some(),
                "key_file",
                self.key_file.is_some(),
            ),
        ];
        for (key, given, other, other_given) in pairs {
            if given != other_given {
                let (key, missing) = if given { (key, other) } else { (other, key) };
                problems.push(Problem::of(
                    key,
                    format!("`{missing}` belongs to it and is missing"),
                ));
            }
        }
        let ways = [
            self.credentials_file.is_some(),
            self.token_file.is_some(),
            self.user.is_some(),
        ];
        if ways.into_iter().filter(|given| *given).count() > 1 {
            let text = "there are several ways to say who we are; keep one of `credentials_file`, `token_file` and `user`";
            problems.push(Problem::at([], text));
        }
        problems
    }
}
