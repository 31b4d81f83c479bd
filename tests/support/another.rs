//! An additional warmroute process for the workers of a deployment.

use std::path::PathBuf;

use serde_json::{Value, json};
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{FreePort, PATIENCE, ReadyCheck, wait_ready};

use crate::support::deployment::{TestDeployment, programs};
use crate::support::openmetrics::{self, OpenMetricsPage};

/// An additional warmroute process for the workers of a deployment.
pub(crate) struct SecondRouter {
    pub(crate) child: ChildProcess,
    /// ext_proc socket of the process.
    pub(crate) socket: PathBuf,
    admin: String,
    http: reqwest::Client,
}

impl SecondRouter {
    /// Starts the process with the configuration of the deployment, its own listeners, and `more`
    /// merged in.
    pub(crate) fn spawn(deployment: &TestDeployment, name: &str, more: &Value) -> Self {
        let text = std::fs::read(deployment.run_dir.join("warmroute.yaml")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        let socket = deployment.run_dir.join(format!("{name}.sock"));
        let admin = format!("127.0.0.1:{}", FreePort::find().unwrap().release());
        config["listeners"]["ext_proc"] = json!({"unix_socket": socket});
        config["listeners"]["admin"] = json!({"address": admin});
        config["listeners"]["api"] = Value::Null;
        config["envoy"] = Value::Null;
        if let Some(index) = config["index"].as_object_mut() {
            index.remove("warm_start");
            index.remove("serve");
        }
        merge_config(&mut config, more);
        let file = deployment.run_dir.join(format!("{name}.yaml"));
        std::fs::write(&file, config.to_string()).unwrap();
        let mut command = std::process::Command::new(&programs().warmroute[0]);
        command.arg("serve").arg("--config").arg(&file);
        let child = ChildProcess::spawn(name, &command, &deployment.run_dir).unwrap();
        Self {
            child,
            socket,
            admin,
            http: deployment.http.clone(),
        }
    }

    /// Starts the process and waits until it is ready.
    pub(crate) async fn start(deployment: &TestDeployment, name: &str, more: &Value) -> Self {
        let another = Self::spawn(deployment, name, more);
        another.is_ready().await;
        another
    }

    pub(crate) async fn is_ready(&self) {
        wait_ready(
            ReadyCheck::Http(&self.url("/readyz")),
            PATIENCE,
            &self.child,
        )
        .await
        .unwrap();
    }

    pub(crate) fn url(&self, page: &str) -> String {
        format!("http://{}{page}", self.admin)
    }

    /// Returns a page below `/debug/`.
    pub(crate) async fn page(&self, name: &str) -> Value {
        let page = self.http.get(self.url(&format!("/debug/{name}")));
        let page = page.send().await.unwrap().json().await;
        page.unwrap_or_else(|error| panic!("{error}\n{}", self.child.log_tail()))
    }

    pub(crate) async fn metrics(&self) -> OpenMetricsPage {
        let page = self.http.get(self.url("/metrics"));
        let page = page.header("accept", openmetrics::ACCEPT).send().await;
        OpenMetricsPage::read(&page.unwrap().text().await.unwrap())
    }

    /// Returns the shipped Envoy configuration with the socket of this process.
    pub(crate) fn envoy_config(&self, deployment: &TestDeployment) -> String {
        let first = deployment.envoy_setup().ext_proc_socket();
        deployment.envoy_config().replace(
            &first.display().to_string(),
            &self.socket.display().to_string(),
        )
    }
}
