//! Configuration of replica sync.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use warmroute_settings::{Period, Problem, has_credentials};

/// `replicas:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicasConfig {
    /// NATS connection.
    pub nats: NatsConfig,
    /// Name of the group: replicas of one group serve the same workers. Other groups on the same
    /// servers are independent.
    #[serde(default = "group")]
    pub group: String,
    /// Display name of this replica; the host name if omitted.
    #[serde(default)]
    pub name: Option<String>,
    /// Interval in which events are combined into a batch.
    #[serde(default = "batch_interval")]
    pub batch_interval: Period,
    /// Time without a message after which the reservations of a peer are dropped.
    #[serde(default = "lease")]
    pub lease: Period,
    /// Time limit of the initial sync, during which the process is not ready.
    #[serde(default = "sync_timeout")]
    pub sync_timeout: Period,
}

/// `replicas.nats:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NatsConfig {
    /// Servers of one cluster, `nats://host:port` or `tls://`.
    pub servers: Vec<String>,
    /// NATS credentials file with a JWT and its seed.
    pub credentials_file: Option<PathBuf>,
    /// File with a token, read at each connect.
    pub token_file: Option<PathBuf>,
    /// User name.
    pub user: Option<String>,
    /// File with the password, read at each connect.
    pub password_file: Option<PathBuf>,
    /// CA of the servers, PEM; the system roots if omitted.
    pub ca_file: Option<PathBuf>,
    /// Client certificate, PEM, if the servers require one.
    pub cert_file: Option<PathBuf>,
    /// Private key of the client certificate, PEM.
    pub key_file: Option<PathBuf>,
}

fn group() -> String {
    "default".to_owned()
}

fn batch_interval() -> Period {
    Period::millis(1)
}

fn lease() -> Period {
    Period::seconds(5)
}

fn sync_timeout() -> Period {
    Period::seconds(5)
}

impl ReplicasConfig {
    /// Resolves relative paths against the folder of the configuration file.
    pub fn resolve(&mut self, folder: &Path) {
        self.nats.files().into_iter().for_each(|(_, file)| {
            if let Some(file) = file {
                *file = folder.join(&*file);
            }
        });
    }

    /// Returns semantic errors.
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
                "the group is part of a NATS subject; use only letters, digits, - and _",
            );
        }
        if self.batch_interval.get() > std::time::Duration::from_secs(1) {
            refuse(
                "batch_interval",
                "replicas would receive bookings too late; the default is 1ms, the maximum is 1s",
            );
        }
        if self.lease.get() < std::time::Duration::from_millis(200) {
            refuse(
                "lease",
                "a short pause would drop live bookings; the default is 5s, the minimum is 200ms",
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
                "no server is configured; write for example nats://nats:4222",
            ));
        }
        for (at, server) in self.servers.iter().enumerate() {
            if has_credentials(server) {
                let text = "the server address appears on status pages and must not contain a password; set `user` and `password_file`, or `token_file`";
                problems.push(Problem::at(["servers".into(), at.into()], text));
            } else if let Err(error) = server.parse::<async_nats::ServerAddr>() {
                let text = format!(
                    "`{server}` is not a server address ({error}); write for example nats://nats:4222"
                );
                problems.push(Problem::at(["servers".into(), at.into()], text));
            }
        }
        for (key, file) in self.clone().files() {
            if let Some(file) = file.as_ref().filter(|file| !file.is_file()) {
                problems.push(Problem::of(
                    key,
                    format!("the file {} does not exist", file.display()),
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
                problems.push(Problem::of(key, format!("requires `{missing}`")));
            }
        }
        let ways = [
            self.credentials_file.is_some(),
            self.token_file.is_some(),
            self.user.is_some(),
        ];
        if ways.into_iter().filter(|given| *given).count() > 1 {
            let text = "several kinds of credentials are configured; keep one of `credentials_file`, `token_file` and `user`";
            problems.push(Problem::at([], text));
        }
        problems
    }
}
