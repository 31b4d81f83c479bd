//! A server process with the configuration of a transcript, and its pages.

use std::ops::Deref;
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use warmroute_testbed::ports::PATIENCE;

use crate::site::{ServerSite, replace_file};

/// A running server.
pub(crate) struct ExchangeSite {
    pub(crate) gateway: ExternalProcessorClient<Channel>,
    pub(crate) channel: Channel,
    server: ServerSite,
}

impl Deref for ExchangeSite {
    type Target = ServerSite;

    fn deref(&self) -> &ServerSite {
        &self.server
    }
}

impl ExchangeSite {
    /// Starts the server and waits until it is ready. A server without workers never becomes ready.
    pub(crate) async fn start(written: &Value) -> Self {
        let mut config = written.clone();
        let workers = config["workers"]
            .as_object_mut()
            .and_then(|workers| workers.remove("list"))
            .unwrap_or_else(|| json!([]));
        config["workers"]["file"] = json!("workers.yaml");
        if config["engines"]["load"].is_null() {
            // No engines exist. A failed scrape would be evidence against a worker, after a time.
            config["engines"]["load"] = json!({ "enabled": false });
        }
        if config["gateway"]["observe"].is_null() {
            // The default observes a random sample of responses completely. Transcripts need the same
            // replies every time.
            config["gateway"]["observe"] = json!("first_token");
        }
        let text = config.to_string();
        let text = text.replace("${root}", env!("CARGO_MANIFEST_DIR"));
        let config = serde_json::from_str(&text).unwrap();
        let server = ServerSite::start(&config, |directory| {
            replace_file(directory, "workers.yaml", &workers.to_string())
        })
        .await;
        let channel = server.channel().await;
        let gateway =
            ExternalProcessorClient::new(channel.clone()).max_decoding_message_size(usize::MAX);
        let site = Self {
            gateway,
            channel,
            server,
        };
        if workers != json!([]) {
            site.until("readyz", |page| page["ready"] == true).await;
        }
        site.until("debug/fleet", |page| page.is_object()).await;
        site
    }

    /// Returns a gateway client on a connection with these receive windows, in bytes.
    pub(crate) async fn gateway_with_windows(
        &self,
        stream: u32,
        connection: u32,
    ) -> ExternalProcessorClient<Channel> {
        let endpoint = self.endpoint().initial_stream_window_size(stream);
        let endpoint = endpoint.initial_connection_window_size(connection);
        ExternalProcessorClient::new(endpoint.connect().await.unwrap())
    }

    /// Replaces the list of workers, and waits until the new list is in use.
    pub(crate) async fn workers(&self, workers: &[Value]) {
        self.replace_file("workers.yaml", &Value::from(workers).to_string());
        let count = workers.len();
        self.until("debug/fleet", |page| {
            page["members"]
                .as_array()
                .is_some_and(|found| found.len() == count)
        })
        .await;
    }

    /// Polls the health of a service until it is as expected or the timeout expires. Returns its
    /// last status.
    pub(crate) async fn health(&self, service: &str, expected: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let health_request = HealthCheckRequest {
                service: service.to_owned(),
            };
            let mut health = HealthClient::new(self.channel.clone());
            let found = match health.check(health_request).await {
                Ok(answer) => answer.into_inner().status().as_str_name().to_owned(),
                Err(status) => format!("{:?}", status.code()),
            };
            if found == expected || Instant::now() > deadline {
                return found;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Stops the process and waits until it has ended.
    pub(crate) async fn stop(self) {
        drop((self.gateway, self.channel));
        self.server.end().await;
    }
}
