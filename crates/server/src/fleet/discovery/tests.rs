use std::path::Path;

use proptest::prelude::*;
use warmroute_core::worker::{TransferEnforcement, Worker, WorkerId};

use super::template::TemplateConfig;
use super::zmq::ZmqEndpoint;
use super::*;

fn workers(text: &str) -> Result<Vec<Worker>, Vec<ConfigError>> {
    let model = WorkerModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        uses_bootstrap: false,
    };
    parse(Path::new("w"), text.as_bytes(), &[model])
}

#[test]
fn worker_without_events_uses_model_block_size() {
    let workers = workers("- {id: 1, endpoint: 10.0.0.1:80, data_parallel: {size: 3}}").unwrap();
    assert!(workers[0].event_sources.is_empty());
    assert_eq!(
        (workers[0].ranks.size.get(), workers[0].block_size.tokens()),
        (3, 16)
    );
}

#[test]
fn last_port_is_accepted() {
    let list = "- {id: 1, endpoint: 10.0.0.1:80, data_parallel: {size: 2}, kv_events: {endpoint: 'tcp://h:65534'}}";
    assert_eq!(
        workers(list).unwrap()[0].event_sources[1].endpoint,
        "tcp://h:65535"
    );
}

#[test]
fn endpoint_prints_as_parsed_and_binds_address() {
    for (text, bind_address) in [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[fd00::1]:1", "tcp://[fd00::1]:1"),
        (
            "tcp://engine-0.engines:65535",
            "tcp://engine-0.engines:65535",
        ),
        ("tcp://*:5557", "tcp://0.0.0.0:5557"),
        ("ipc:///run/a b.sock", "ipc:///run/a b.sock"),
        ("ipc://@abstract", "ipc://@abstract"),
    ] {
        let endpoint: ZmqEndpoint = text.parse().unwrap();
        assert_eq!(
            (endpoint.to_string().as_str(), endpoint.to_bind().as_str()),
            (text, bind_address)
        );
    }
}

#[test]
fn only_unspecified_addresses_are_wildcards() {
    for (text, wildcard) in [
        ("tcp://*:1", true),
        ("tcp://0.0.0.0:1", true),
        ("tcp://[::]:1", true),
        ("tcp://[::1]:1", false),
        ("tcp://host:1", false),
        ("ipc://*", false),
    ] {
        assert_eq!(
            text.parse::<ZmqEndpoint>().unwrap().is_wildcard(),
            wildcard,
            "{text}"
        );
    }
}

#[test]
fn adapters_topology_and_constraints_are_parsed() {
    let list = "- {id: 1, endpoint: 10.0.0.1:80, role: prefill, adapters: [a], topology: {rack: r1, zone: z}, \
                kv_transfer: {domain: rack, enforcement: preferred, weight: 0.5}}\n\
                - {id: 2, endpoint: 10.0.0.2:80, topology: {rack: r1}, \
                kv_transfer: {domain: rack, enforcement: required}}";
    let workers = workers(list).unwrap();
    let constraint = |at: usize| {
        workers[at]
            .kv_transfer
            .clone()
            .map(|transfer| (transfer.domain, transfer.enforcement))
    };
    assert_eq!(
        constraint(0),
        Some(("rack".to_owned(), TransferEnforcement::Preferred(0.5)))
    );
    assert_eq!(
        constraint(1),
        Some(("rack".to_owned(), TransferEnforcement::Required))
    );
    assert!(workers[0].adapters.contains("a"));
    let has_taints = ["dynamo.topology/rack=r1", "dynamo.topology/zone=z"]
        .map(|taint| workers[1].has_taint(taint));
    assert_eq!(
        (has_taints, workers[0].has_taint("dynamo.topology/zone=z")),
        ([true, false], true)
    );
}

proptest! {
    #[test]
    fn arbitrary_workers_file_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(Path::new("w"), &bytes, &[]);
    }

    #[test]
    fn damaged_workers_file_never_panics(cut in 0usize..2000, at in 0usize..2000, byte: u8) {
        let mut bytes = include_bytes!("../../../../../examples/workers.yaml").to_vec();
        let length = bytes.len();
        bytes[at % length] = byte;
        bytes.truncate(length - cut % length);
        let model = WorkerModel { name: "qwen2.5".into(), block_size: BlockSize::new(16).unwrap(), uses_bootstrap: false };
        let _ = parse(Path::new("w"), &bytes, &[model]);
    }

    #[test]
    fn parsed_endpoint_round_trips(text in "(tcp|ipc)://[a-z0-9.:\\[\\]*-]{1,16}") {
        if let Ok(endpoint) = text.parse::<ZmqEndpoint>() {
            prop_assert_eq!(endpoint.to_string().parse::<ZmqEndpoint>().unwrap(), endpoint);
        }
    }
}

#[test]
fn new_worker_replaces_draining_one_at_its_address() {
    let served = [WorkerModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        uses_bootstrap: false,
    }];
    let list = |first: bool, second: bool| -> Vec<config::WorkerConfig> {
        let worker = |id: u64, draining: bool| serde_json::json!({"id": id, "model": "m", "endpoint": "10.0.0.1:8000", "draining": draining});
        serde_json::from_value(serde_json::json!([worker(1, first), worker(2, second)])).unwrap()
    };
    for (first, second, expected) in [(true, false, 2), (false, true, 1)] {
        let (workers, errors) = resolve_each(list(first, second), &served);
        assert_eq!(
            workers.iter().map(|worker| worker.id.0).collect::<Vec<_>>(),
            [expected]
        );
        assert_eq!(errors, Vec::<String>::new());
    }
    // Two workers that accept requests cannot have one address.
    let (workers, errors) = resolve_each(list(false, false), &served);
    assert_eq!((workers.len(), errors.len()), (1, 1), "{errors:?}");
}

#[test]
fn front_end_is_the_endpoint_of_several_workers() {
    let list = |first: &str, second: &str| {
        workers(&format!(
            "- {{id: 1, endpoint: 10.0.0.1:80{first}}}\n- {{id: 2, endpoint: 10.0.0.1:80{second}}}"
        ))
    };
    let shared = list(", via: front_end", ", via: front_end").unwrap();
    assert!(shared.iter().all(|worker| !worker.via.is_direct()));
    for (first, second) in [
        ("", ""),
        ("", ", via: front_end"),
        (", via: front_end", ""),
        (", via: direct", ""),
    ] {
        let found = list(first, second).unwrap_err();
        assert!(
            found.len() == 1 && found[0].to_string().contains("has `via: front_end`"),
            "{found:?}"
        );
    }
}

#[test]
fn draining_worker_stays_behind_its_front_end() {
    let worker = |id: u64, draining: bool| serde_json::json!({"id": id, "model": "m", "endpoint": "10.0.0.1:8000", "via": "front_end", "draining": draining});
    let list = serde_json::json!([worker(1, true), worker(2, false)]);
    let served = [WorkerModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        uses_bootstrap: false,
    }];
    let (workers, errors) = resolve_each(serde_json::from_value(list).unwrap(), &served);
    assert_eq!((workers.len(), errors), (2, Vec::new()));
}

#[test]
fn template_names_the_front_end_of_pods() {
    let template: TemplateConfig = serde_json::from_value(
        serde_json::json!({"front_end": "10.96.0.9:8000", "kv_events": {"port": 5557}}),
    )
    .unwrap();
    let pod = template.worker(WorkerId(1), ([10, 0, 1, 4], 8000).into(), None);
    assert_eq!(
        (pod.endpoint.to_string().as_str(), pod.via.is_direct()),
        ("10.96.0.9:8000", false)
    );
    let events = pod.kv_events.unwrap().endpoint.unwrap();
    assert_eq!(events.to_string(), "tcp://10.0.1.4:5557");
}
