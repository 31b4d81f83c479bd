//! Configuration of replica sync.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem, all_within, has_credentials};

/// The section `replicas:`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplicasConfig {
    /// NATS connection.
    pub nats: NatsConfig,
    /// Name of the group. All replicas of a group serve the same workers. Other groups on the same
    /// NATS servers are independent.
    #[serde(default = "group")]
    pub group: String,
    /// Display name of this replica. Default: the host name.
    #[serde(default)]
    pub name: Option<String>,
    /// Time without a message after which the reservations of a peer are dropped.
    #[serde(default = "lease")]
    pub lease: DurationSetting,
    /// Maximum duration of the initial sync, during which the process is not ready.
    #[serde(default = "sync_timeout")]
    pub sync_timeout: DurationSetting,
}

/// The section `replicas.nats:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NatsConfig {
    /// Servers of one NATS cluster: `nats://host:port` or `tls://host:port`.
    pub servers: Vec<String>,
    /// NATS credentials file with a JWT and its NKey seed.
    pub credentials_file: Option<PathBuf>,
    /// File with the token. It is read for each connection.
    pub token_file: Option<PathBuf>,
    /// User name.
    pub user: Option<String>,
    /// File with the password. It is read for each connection.
    pub password_file: Option<PathBuf>,
    /// CA certificates (PEM) that verify the servers. Default: the CAs of the system.
    pub ca_file: Option<PathBuf>,
    /// Client certificate (PEM), if the servers require one.
    pub cert_file: Option<PathBuf>,
    /// Private key of the client certificate (PEM).
    pub key_file: Option<PathBuf>,
}

fn group() -> String {
    "default".to_owned()
}

fn lease() -> DurationSetting {
    DurationSetting::seconds(5)
}

fn sync_timeout() -> DurationSetting {
    DurationSetting::seconds(5)
}

impl ReplicasConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = all_within("nats", self.nats.problems()).collect();
        let mut add_problem = |key: &str, text: &str| problems.push(Problem::of(key, text));
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if self.group.is_empty() || !self.group.bytes().all(is_plain) {
            add_problem(
                "group",
                "the group is part of a NATS subject; use only letters, digits, - and _",
            );
        }
        if self.lease.get() < std::time::Duration::from_millis(200) {
            add_problem(
                "lease",
                "a short pause would drop live bookings; the default is 5s, the minimum is 200ms",
            );
        }
        problems
    }
}

impl NatsConfig {
    fn files(&self) -> [(&'static str, &Option<PathBuf>); 6] {
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
        for (index, server) in self.servers.iter().enumerate() {
            if has_credentials(server) {
                let text = "the server address appears on status pages and must not contain a \
                    password; set `user` and `password_file`, or `token_file`";
                problems.push(Problem::at(["servers".into(), index.into()], text));
            } else if let Err(error) = server.parse::<async_nats::ServerAddr>() {
                let text = format!(
                    "`{server}` is not a server address ({error}); write for example \
                    nats://nats:4222"
                );
                problems.push(Problem::at(["servers".into(), index.into()], text));
            }
        }
        for (key, file) in self.files() {
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
        let credential_kinds = [
            self.credentials_file.is_some(),
            self.token_file.is_some(),
            self.user.is_some(),
        ];
        if credential_kinds.into_iter().filter(|given| *given).count() > 1 {
            let text = "several kinds of credentials are configured; keep one of \
                `credentials_file`, `token_file` and `user`";
            problems.push(Problem::at([], text));
        }
        problems
    }
}
