//! One more of us beside that of a deployment, for the same workers.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::deployment::{Deployment, PATIENCE, programs};
use super::support::child::Child;
use super::support::ports::{FreePort, Ready, wait_ready};

/// One more.
pub(crate) struct Another {
    pub(crate) child: Child,
    /// Where Envoy asks it.
    pub(crate) socket: PathBuf,
    admin: String,
    http: reqwest::Client,
}

impl Another {
    /// With the configuration of the deployment's own, a socket and pages of its own, and these sections.
    pub(crate) fn spawn(deployment: &Deployment, name: &str, more: &Value) -> Self {
        let text = std::fs::read(deployment.run_dir.join("warmroute.yaml")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        let socket = deployment.run_dir.join(format!("{name}.sock"));
        let admin = format!("127.0.0.1:{}", FreePort::find().unwrap().release());
        config["listen"] = json!({"unix": socket});
        config["admin"] = json!({"listen": admin});
        let sections = config.as_object_mut().unwrap();
        for own in ["api", "envoy", "takeover", "serve_index"] {
            sections.remove(own);
        }
        sections.extend(more.as_object().unwrap().clone());
        let file = deployment.run_dir.join(format!("{name}.yaml"));
        std::fs::write(&file, config.to_string()).unwrap();
        let mut command = std::process::Command::new(&programs().warmroute[0]);
        command.arg("serve").arg("--config").arg(&file);
        let child = Child::spawn(name, &command, &deployment.run_dir).unwrap();
        Self {
            child,
            socket,
            admin,
            http: deployment.http.clone(),
        }
    }

    /// The same, ready.
    pub(crate) async fn start(deployment: &Deployment, name: &str, more: &Value) -> Self {
        let another = Self::spawn(deployment, name, more);
        another.is_ready().await;
        another
    }

    pub(crate) async fn is_ready(&self) {
        wait_ready(Ready::Http(&self.url("/readyz")), PATIENCE, &self.child)
            .await
            .unwrap();
    }

    pub(crate) fn url(&self, page: &str) -> String {
        format!("http://{}{page}", self.admin)
    }

    /// What it says of its index.
    pub(crate) async fn index(&self) -> Value {
        let page = self
            .http
            .get(self.url("/debug/index"))
            .send()
            .await
            .unwrap();
        page.json()
            .await
            .unwrap_or_else(|error| panic!("{error}\n{}", self.child.log_tail()))
    }

    /// The shipped configuration of Envoy, which asks this one.
    pub(crate) fn envoy_config(&self, deployment: &Deployment) -> String {
        let first = deployment.standalone().ext_proc_socket();
        deployment.envoy_config().replace(
            &first.display().to_string(),
            &self.socket.display().to_string(),
        )
    }
}
