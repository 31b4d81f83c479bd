//! A deployment with one of the generated configurations.

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};

use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::FreePort;

use crate::gateways::generated::{GatewayFixture, GeneratedConfig, local};
use crate::shipped::bursts::BurstEngine;
use crate::support::deployment::{TestDeployment, with_response_headers};

pub(crate) struct GatewayTestbed {
    deployment: TestDeployment,
    gateway: GatewayFixture,
    /// Port of warmroute's ext_proc listener.
    port: u16,
    workers: Vec<SocketAddr>,
}

impl Deref for GatewayTestbed {
    type Target = TestDeployment;

    fn deref(&self) -> &TestDeployment {
        &self.deployment
    }
}

impl DerefMut for GatewayTestbed {
    fn deref_mut(&mut self) -> &mut TestDeployment {
        &mut self.deployment
    }
}

impl GatewayTestbed {
    /// Starts simulated engines only. [`GatewayTestbed::start`] starts the rest.
    pub(crate) async fn engines(gateway: GatewayFixture, specs: &[EngineSpec]) -> Self {
        let deployment = TestDeployment::engines(specs).await;
        deployment.write_workers().unwrap();
        let workers = deployment.addresses();
        Self::of(deployment, gateway, workers)
    }

    /// Like [`GatewayTestbed::engines`], for workers that the test has started.
    pub(crate) async fn workers(gateway: GatewayFixture, workers: &[BurstEngine]) -> Self {
        let deployment = TestDeployment::engines(&[]).await;
        deployment
            .write_worker_entries(&BurstEngine::entries(workers))
            .unwrap();
        Self::of(deployment, gateway, BurstEngine::addresses(workers))
    }

    fn of(deployment: TestDeployment, gateway: GatewayFixture, workers: Vec<SocketAddr>) -> Self {
        Self {
            deployment,
            gateway,
            port: FreePort::find().unwrap().release(),
            workers,
        }
    }

    /// Returns warmroute's configuration of the ConfigMap, with response headers for every
    /// decision.
    pub(crate) fn warmroute(&self) -> Value {
        let mut config = with_response_headers(self.gateway.warmroute());
        config["listeners"]["ext_proc"]["address"] = json!(local(self.port));
        // The generated configurations do not use the endpoint file of the deployment.
        config["envoy"] = Value::Null;
        // A dead worker loses its prefixes with its event stream. In these tests, requests must
        // still choose it.
        config["index"]["freshness"] = json!({"stale_credit": 1.0});
        config
    }

    /// Moves some workers to the cluster of a second pool, which calls the same warmroute.
    pub(crate) fn place_second_pool(
        &mut self,
        config: &mut GeneratedConfig,
        picker: &str,
        workers: &str,
    ) {
        let second = self.workers.split_off(self.workers.len() / 2);
        config.set_endpoints(picker, &[local(self.port)]);
        if config.cluster(workers)["type"] == "STATIC" {
            config.set_endpoints(workers, &second);
        }
    }

    pub(crate) async fn start(&mut self, config: GeneratedConfig) {
        self.start_warmroute().await;
        self.start_envoy(config).await;
    }

    pub(crate) async fn start_warmroute(&mut self) {
        let config = self.warmroute();
        self.deployment.start_router(&config).await.unwrap();
    }

    pub(crate) async fn start_envoy(&mut self, config: GeneratedConfig) {
        let pickers = [local(self.port)];
        self.start_envoy_with(config, &pickers).await;
    }

    /// Starts Envoy with other endpoints in the cluster of warmroute.
    pub(crate) async fn start_envoy_with(
        &mut self,
        mut config: GeneratedConfig,
        pickers: &[SocketAddr],
    ) {
        let place = self.deployment.envoy_setup();
        config.set_ports(place.port, place.admin_port);
        config.set_endpoints(self.gateway.picker, pickers);
        // An ORIGINAL_DST cluster has no endpoints.
        if config.cluster(self.gateway.workers)["type"] == "STATIC" {
            config.set_endpoints(self.gateway.workers, &self.workers);
        }
        self.deployment
            .start_envoy(&config.0.to_string())
            .await
            .unwrap();
    }
}
