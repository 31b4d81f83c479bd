//! The shipped configuration with additional listeners, each changed for one case.

use std::ops::Deref;

use reqwest::RequestBuilder;
use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::FreePort;

use crate::routing::bed::{RoutingBed, patient};

/// Changes the connection manager of a listener.
pub(crate) type ManagerChange = Box<dyn Fn(&mut ConnectionManager)>;

/// The HTTP connection manager of a listener.
pub(crate) struct ConnectionManager(Value);

impl ConnectionManager {
    /// Returns the ext_proc filter that routes.
    pub(crate) fn filter(&mut self) -> &mut Value {
        let filters = self.0["http_filters"].as_array_mut().unwrap();
        let found = filters
            .iter_mut()
            .find(|filter| filter["name"] == "envoy.filters.http.ext_proc");
        &mut found.unwrap()["typed_config"]
    }

    /// Inserts a filter before all others.
    pub(crate) fn first(&mut self, filter: Value) {
        self.0["http_filters"]
            .as_array_mut()
            .unwrap()
            .insert(0, filter);
    }

    /// Removes the filter that detects first tokens.
    pub(crate) fn remove_first_token_probe(&mut self) {
        self.0["http_filters"]
            .as_array_mut()
            .unwrap()
            .retain(|filter| filter["name"] != "first_token_probe");
        self.filter()["grpc_service"].as_object_mut().unwrap()["envoy_grpc"] =
            json!({"cluster_name": "ext_proc"});
        self.filter()["grpc_service"]
            .as_object_mut()
            .unwrap()
            .remove("initial_metadata");
    }

    pub(crate) fn modes(&mut self, changed: &[(&str, &str)]) {
        for (key, value) in changed {
            self.filter()["processing_mode"][*key] = json!(value);
        }
    }

    /// Sets full-duplex mode for request bodies.
    pub(crate) fn duplex(&mut self) {
        self.modes(&[
            ("request_body_mode", "FULL_DUPLEX_STREAMED"),
            ("request_trailer_mode", "SEND"),
        ]);
    }

    /// Removes the retry policy.
    pub(crate) fn without_retries(&mut self) {
        let route = &mut self.0["route_config"]["virtual_hosts"][0]["routes"][0]["route"];
        assert!(
            route
                .as_object_mut()
                .unwrap()
                .remove("retry_policy")
                .is_some()
        );
    }

    /// Permits upgrades to WebSocket.
    pub(crate) fn allow_upgrades(&mut self) {
        self.0["upgrade_configs"] = json!([{"upgrade_type": "websocket"}]);
    }

    pub(crate) fn buffer(&mut self, bytes: u32) {
        self.0["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"] = json!(bytes);
    }
}

/// A deployment whose Envoy has an additional listener per change.
pub(crate) struct ModeGateway {
    bed: RoutingBed,
    /// Port of each additional listener.
    pub(crate) ports: Vec<u16>,
}

impl Deref for ModeGateway {
    type Target = RoutingBed;

    fn deref(&self) -> &RoutingBed {
        &self.bed
    }
}

impl std::ops::DerefMut for ModeGateway {
    fn deref_mut(&mut self) -> &mut RoutingBed {
        &mut self.bed
    }
}

impl ModeGateway {
    pub(crate) async fn start(
        specs: &[EngineSpec],
        more: Value,
        changes: &[ManagerChange],
    ) -> Self {
        let ports: Vec<u16> = changes
            .iter()
            .map(|_| FreePort::find().unwrap().release())
            .collect();
        let bed = RoutingBed::start_with_envoy(specs, more, |shipped| {
            with_listeners(&patient(shipped), &ports, changes)
        })
        .await;
        Self { bed, ports }
    }

    /// Returns a URL on a listener.
    pub(crate) fn at(&self, listener: usize, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.ports[listener])
    }

    /// Returns a chat request to a listener.
    pub(crate) fn chat_to(&self, listener: usize, body: &Value) -> RequestBuilder {
        self.http
            .post(self.at(listener, "/v1/chat/completions"))
            .json(body)
    }
}

fn with_listeners(shipped: &str, ports: &[u16], changes: &[ManagerChange]) -> String {
    let mut config: Value = serde_saphyr::from_str(shipped).unwrap();
    let listeners = config["static_resources"]["listeners"]
        .as_array_mut()
        .unwrap();
    let own = listeners[0].clone();
    for (port, change) in ports.iter().zip(changes) {
        let mut listener = own.clone();
        listener["name"] = json!(format!("case-{port}"));
        listener["address"]["socket_address"]["port_value"] = json!(port);
        let place = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
        let mut manager = ConnectionManager(place.take());
        // Without this option, Envoy drops HTTP/1 trailers.
        manager.0["http_protocol_options"] = json!({"enable_trailers": true});
        change(&mut manager);
        *place = manager.0;
        listeners.push(listener);
    }
    config.to_string()
}
