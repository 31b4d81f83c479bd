use std::path::Path;

use proptest::prelude::*;

use super::zmq::ZmqEndpoint;
use super::*;
use crate::worker::Worker;

fn workers(text: &str) -> Result<Vec<Worker>, Vec<ConfigError>> {
    let model = ServedModel { name: "m".into(), block_size: BlockSize::new(16).unwrap() };
    parse(Path::new("w"), text.as_bytes(), &[model])
}

#[test]
fn a_worker_without_events_has_no_sources_and_takes_the_models_block_size() {
    let workers = workers("- {id: 1, endpoint: 10.0.0.1:80, data_parallel: {size: 3}}").unwrap();
    assert!(workers[0].event_sources.is_empty());
    assert_eq!((workers[0].ranks.size.get(), workers[0].block_size.tokens()), (3, 16));
}

#[test]
fn the_last_port_can_be_used() {
    let list = "- {id: 1, endpoint: 10.0.0.1:80, data_parallel: {size: 2}, kv_events: {endpoint: 'tcp://h:65534'}}";
    assert_eq!(workers(list).unwrap()[0].event_sources[1].endpoint, "tcp://h:65535");
}

#[test]
fn an_endpoint_prints_what_it_read_and_binds_to_an_address() {
    for (text, bound) in [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[fd00::1]:1", "tcp://[fd00::1]:1"),
        ("tcp://engine-0.engines:65535", "tcp://engine-0.engines:65535"),
        ("tcp://*:5557", "tcp://0.0.0.0:5557"),
        ("ipc:///run/a b.sock", "ipc:///run/a b.sock"),
        ("ipc://@abstract", "ipc://@abstract"),
    ] {
        let endpoint: ZmqEndpoint = text.parse().unwrap();
        assert_eq!((endpoint.to_string().as_str(), endpoint.to_bind().as_str()), (text, bound));
    }
}

#[test]
fn only_addresses_that_mean_all_addresses_are_wildcards() {
    for (text, wildcard) in [
        ("tcp://*:1", true),
        ("tcp://0.0.0.0:1", true),
        ("tcp://[::]:1", true),
        ("tcp://[::1]:1", false),
        ("tcp://host:1", false),
        ("ipc://*", false),
    ] {
        assert_eq!(text.parse::<ZmqEndpoint>().unwrap().is_wildcard(), wildcard, "{text}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_reading_the_workers_file_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(Path::new("w"), &bytes, &[]);
    }

    #[test]
    fn no_cut_or_changed_byte_makes_reading_the_workers_file_panic(cut in 0usize..2000, at in 0usize..2000, byte: u8) {
        let mut bytes = include_bytes!("../../examples/workers.yaml").to_vec();
        let length = bytes.len();
        bytes[at % length] = byte;
        bytes.truncate(length - cut % length);
        let model = ServedModel { name: "qwen2.5".into(), block_size: BlockSize::new(16).unwrap() };
        let _ = parse(Path::new("w"), &bytes, &[model]);
    }

    #[test]
    fn any_endpoint_that_is_read_is_printed_so_that_it_reads_the_same(text in "(tcp|ipc)://[a-z0-9.:\\[\\]*-]{1,16}") {
        if let Ok(endpoint) = text.parse::<ZmqEndpoint>() {
            prop_assert_eq!(endpoint.to_string().parse::<ZmqEndpoint>().unwrap(), endpoint);
        }
    }
}
