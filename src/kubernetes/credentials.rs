//! API server address and credentials, of the pod or of a kubeconfig.
//!
//! Tokens and certificates are replaced while the process runs, so their files are compared before
//! each request.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{AuthInfo, InClusterError, KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use xxhash_rust::xxh3::xxh3_64;

use warmroute_runtime::causes::causes;
use warmroute_runtime::files;
use warmroute_server::fleet::discovery::kubernetes::KubernetesConfig;
use warmroute_settings::{
    MAX_SECRET_FILE, MAX_SETTINGS_FILE, open_regular_file, read_regular_file,
};

/// Timeout of a TCP and TLS handshake.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Directory where the kubelet mounts the service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Origin of the credentials.
#[derive(Clone, Debug)]
pub(super) struct CredentialSource {
    kubeconfig: Option<PathBuf>,
    context: Option<String>,
}

impl From<&KubernetesConfig> for CredentialSource {
    fn from(config: &KubernetesConfig) -> Self {
        Self {
            kubeconfig: config.kubeconfig.clone(),
            context: config.context.clone(),
        }
    }
}

/// Files that the credentials of a client were read from.
#[derive(Clone, Debug, Default)]
pub(super) struct CredentialFiles {
    pub(super) token: Option<PathBuf>,
    pub(super) authority: Option<PathBuf>,
    others: Vec<PathBuf>,
    /// Hash of the contents. The contents are not stored, because they are secret.
    contents: u64,
}

impl CredentialFiles {
    /// Returns whether any of the files has changed.
    pub(super) async fn have_changed(&self) -> bool {
        self.hash().await != self.contents
    }

    async fn hash(&self) -> u64 {
        let mut all = Vec::new();
        for path in self.token.iter().chain(&self.authority).chain(&self.others) {
            let content = files::read(path, MAX_SETTINGS_FILE)
                .await
                .unwrap_or_default();
            all.extend_from_slice(&xxh3_64(&content).to_le_bytes());
        }
        xxh3_64(&all)
    }
}

/// Client with its credentials.
pub(super) struct ApiConnection {
    pub(super) client: Client,
    /// Namespace of the pod or of the context.
    pub(super) namespace: String,
    pub(super) address: String,
    pub(super) files: CredentialFiles,
}

impl CredentialSource {
    /// Creates a client from the credentials. The error text contains the fix.
    pub(super) async fn connect(&self) -> Result<ApiConnection, String> {
        let read = match &self.kubeconfig {
            Some(path) => {
                // The library would read any kind of file.
                open_regular_file(path, MAX_SETTINGS_FILE).map_err(|error| {
                    format!("the kubeconfig {} cannot be used: {error}", path.display())
                })?;
                Some(Kubeconfig::read_from(path))
            }
            // The kubeconfig of the user, if there is one.
            None => Kubeconfig::read().ok().map(Ok),
        };
        let opened = match read {
            Some(kubeconfig) => match kubeconfig {
                Ok(kubeconfig) => self
                    .by_kubeconfig(kubeconfig)
                    .await
                    .map_err(|error| describe(&error)),
                Err(error) => Err(describe(&error)),
            },
            None => return in_cluster().await,
        };
        let name = self
            .kubeconfig
            .as_ref()
            .map(|path| path.display().to_string())
            .unwrap_or_default();
        opened.map_err(|error| format!("the kubeconfig {name} cannot be used: {error}"))
    }

    async fn by_kubeconfig(&self, kubeconfig: Kubeconfig) -> Result<ApiConnection, kube::Error> {
        let mut files = self.files_of(&kubeconfig);
        files.contents = files.hash().await;
        let options = KubeConfigOptions {
            context: self.context.clone(),
            ..KubeConfigOptions::default()
        };
        let settings = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
        connection(settings, files)
    }

    fn files_of(&self, kubeconfig: &Kubeconfig) -> CredentialFiles {
        let named = self
            .context
            .as_ref()
            .or(kubeconfig.current_context.as_ref());
        let context = kubeconfig
            .contexts
            .iter()
            .find(|context| Some(&context.name) == named);
        let Some(context) = context.and_then(|context| context.context.as_ref()) else {
            return CredentialFiles::default();
        };
        let cluster = kubeconfig
            .clusters
            .iter()
            .find(|cluster| cluster.name == context.cluster);
        let user = kubeconfig
            .auth_infos
            .iter()
            .find(|user| Some(&user.name) == context.user.as_ref());
        let user: Option<&AuthInfo> = user.and_then(|user| user.auth_info.as_ref());
        let path = |path: &Option<String>| path.as_ref().map(PathBuf::from);
        let certificate = user.map(|user| [path(&user.client_certificate), path(&user.client_key)]);
        CredentialFiles {
            token: user.and_then(|user| path(&user.token_file)),
            authority: cluster
                .and_then(|cluster| path(&cluster.cluster.as_ref()?.certificate_authority)),
            others: self
                .kubeconfig
                .iter()
                .cloned()
                .chain(certificate.into_iter().flatten().flatten())
                .collect(),
            contents: 0,
        }
    }
}

async fn in_cluster() -> Result<ApiConnection, String> {
    let mut files = CredentialFiles {
        token: Some(PathBuf::from(format!("{SERVICE_ACCOUNT}/token"))),
        authority: Some(PathBuf::from(format!("{SERVICE_ACCOUNT}/ca.crt"))),
        ..CredentialFiles::default()
    };
    files.contents = files.hash().await;
    let settings = Config::incluster().map_err(|error| describe_in_cluster(&error))?;
    connection(settings, files).map_err(|error| describe(&error))
}

/// Describes why the service account of the pod cannot be used, with the fix.
fn describe_in_cluster(error: &InClusterError) -> String {
    let mount = "set `automountServiceAccountToken: true` in the pod and in its ServiceAccount";
    match error {
        InClusterError::ReadEnvironmentVariable(_) => "there is neither a kubeconfig nor a pod's \
            environment (KUBERNETES_SERVICE_HOST is not set): run warmroute in a pod, or set \
            `workers.kubernetes.kubeconfig`"
            .to_owned(),
        InClusterError::ReadDefaultNamespace(cause)
        | InClusterError::ReadCertificateBundle(cause) => {
            format!("no service account is mounted at {SERVICE_ACCOUNT} ({cause}): {mount}")
        }
        InClusterError::ParseCertificates(cause) => {
            format!("{SERVICE_ACCOUNT}/ca.crt contains no certificate in PEM: {cause}")
        }
        other => describe(other),
    }
}

/// Creates the client. The token is read from its file here and trimmed, because the library would
/// not remove a trailing newline.
fn connection(mut settings: Config, files: CredentialFiles) -> Result<ApiConnection, kube::Error> {
    if let Some(path) = settings
        .auth_info
        .token_file
        .take()
        .filter(|_| settings.auth_info.token.is_none())
    {
        let failed = |error: &dyn std::fmt::Display| {
            kube::Error::Service(format!("the token file {path}: {error}").into())
        };
        let read = read_regular_file(Path::new(&path), MAX_SECRET_FILE);
        let token = read.map_err(|error| failed(&error))?;
        let token = String::from_utf8(token).map_err(|error| failed(&error))?;
        if token.trim().is_empty() {
            return Err(kube::Error::Service(
                format!("the token file {path} is empty").into(),
            ));
        }
        settings.auth_info.token = Some(token.trim().to_owned().into());
    }
    if settings.root_cert.as_ref().is_some_and(Vec::is_empty) {
        let path = files
            .authority
            .as_ref()
            .map(|path| path.display().to_string())
            .unwrap_or_default();
        return Err(kube::Error::Service(
            format!("the certificate authority {path} contains no certificate").into(),
        ));
    }
    settings.root_cert_file = None;
    settings.default_namespace = settings.default_namespace.trim().to_owned();
    // `list_watch` implements retries, and `ApiClient` deadlines.
    settings.default_retry = false;
    settings.connect_timeout = Some(CONNECT_DEADLINE);
    let namespace = settings.default_namespace.clone();
    let address = settings
        .cluster_url
        .to_string()
        .trim_end_matches('/')
        .to_owned();
    Ok(ApiConnection {
        client: Client::try_from(settings)?,
        namespace,
        address,
        files,
    })
}

/// Formats an error with its causes, each once.
pub(super) fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut parts: Vec<String> = Vec::new();
    for error in causes(error) {
        let text = error.to_string();
        // Many errors end with the text of their cause.
        if let Some(before) = parts.last_mut() {
            *before = before
                .trim_end_matches(text.as_str())
                .trim_end_matches([':', ' '])
                .to_owned();
        }
        parts.push(text);
    }
    let mut seen: Vec<String> = Vec::new();
    for part in parts {
        let part = part
            .trim_start_matches("ServiceError")
            .trim_start_matches([':', ' '])
            .to_owned();
        if !part.is_empty() && !seen.contains(&part) {
            seen.push(part);
        }
    }
    seen.join(": ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn missing_service_account_names_automount() {
        let error = InClusterError::ReadDefaultNamespace(io::ErrorKind::NotFound.into());
        let text = describe_in_cluster(&error);
        assert!(
            text.contains("automountServiceAccountToken: true") && text.contains(SERVICE_ACCOUNT),
            "{text}"
        );
        let error = InClusterError::ReadEnvironmentVariable(std::env::VarError::NotPresent);
        let text = describe_in_cluster(&error);
        assert!(
            text.contains("`workers.kubernetes.kubeconfig`") && !text.contains("automount"),
            "{text}"
        );
    }

    #[test]
    fn causes_are_named_once() {
        let refused = io::Error::new(
            io::ErrorKind::ConnectionRefused,
            "Connection refused (os error 111)",
        );
        let error = kube::Error::Service(Box::new(refused));
        assert_eq!(describe(&error), "Connection refused (os error 111)");
    }

    #[tokio::test]
    async fn trailing_newlines_of_token_and_namespace_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        std::fs::write(&token, "secret\n").unwrap();
        let mut settings = Config::new("http://127.0.0.1:1".parse().unwrap());
        settings.auth_info.token_file = Some(token.display().to_string());
        settings.default_namespace = "inference\n".to_owned();
        let files = CredentialFiles {
            token: Some(token.clone()),
            ..CredentialFiles::default()
        };
        let connection = connection(settings.clone(), files).unwrap();
        assert_eq!(
            (connection.namespace.as_str(), connection.address.as_str()),
            ("inference", "http://127.0.0.1:1")
        );
        std::fs::write(&token, "\n").unwrap();
        let error = super::connection(settings, CredentialFiles::default())
            .err()
            .unwrap();
        assert_eq!(
            describe(&error),
            format!("the token file {} is empty", token.display())
        );
    }
}
