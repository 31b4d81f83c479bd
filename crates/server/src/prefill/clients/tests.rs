use std::net::SocketAddr;

use axum::Router;
use axum::extract::connect_info::{ConnectInfo, IntoMakeServiceWithConnectInfo};
use axum::routing::post;
use tokio::net::TcpListener;
use warmroute_core::worker::WorkerEndpoint;
use warmroute_settings::ByteSize;

use super::*;
use crate::prefill::{PrefillBody, PrefillCall};

/// Returns the clients of a model in each mode.
fn reconfigured(
    clients: &PrefillClients,
    engines: &EnginesConfig,
    metrics: &Arc<Metrics>,
) -> PrefillClients {
    let call = PrefillConfig {
        mode: PrefillMode::Call,
        max_concurrency: 7,
        ..PrefillConfig::default()
    };
    let mirror = PrefillConfig {
        mode: PrefillMode::Mirror,
        ..PrefillConfig::default()
    };
    let models = [("call".into(), call), ("mirror".into(), mirror)];
    let models = models.iter().map(|(model, config)| (model, config));
    clients
        .reconfigure(models, engines, metrics, &TaskTracker::new())
        .unwrap()
}

#[tokio::test]
async fn worker_connections_survive_unrelated_reload() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let worker = WorkerEndpoint(listener.local_addr().unwrap());
    let peer_address = async |ConnectInfo(peer): ConnectInfo<SocketAddr>| peer.to_string();
    let routes: IntoMakeServiceWithConnectInfo<Router, SocketAddr> = Router::new()
        .fallback(post(peer_address))
        .into_make_service_with_connect_info();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let metrics = Arc::new(Metrics::new());
    let engines = EnginesConfig::default();
    let other_engines = EnginesConfig {
        max_response_size: ByteSize::mib(1),
        ..EnginesConfig::default()
    };
    let first = reconfigured(&PrefillClients::default(), &engines, &metrics);
    let same = reconfigured(&first, &engines, &metrics);
    let other = reconfigured(&first, &other_engines, &metrics);
    let mut connections = HashMap::<String, Vec<String>>::new();
    for clients in [&first, &same, &other] {
        for model in ["call", "mirror"] {
            let call = PrefillCall {
                worker,
                path: "/v1/completions".to_owned(),
                headers: reqwest::header::HeaderMap::new(),
                body: PrefillBody::without_handoff("{}".into()),
            };
            let client = &clients.by_model[&ModelName::from(model)];
            let response = client.run(call, (), |(), _, _| {}).await.1.unwrap();
            connections
                .entry(model.to_owned())
                .or_default()
                .push(String::from_utf8(response.body().to_vec()).unwrap());
        }
    }
    for (model, addresses) in connections {
        assert!(
            addresses[0] == addresses[1] && addresses[1] != addresses[2],
            "{model}: {addresses:?}"
        );
    }
    let aborts = |clients: &PrefillClients| Arc::as_ptr(clients.aborts.as_ref().unwrap());
    assert!(aborts(&first) == aborts(&same) && aborts(&first) != aborts(&other));
}
