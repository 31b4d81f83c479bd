use super::*;

fn name(text: &str) -> DnsConfig {
    serde_saphyr::from_str(text).unwrap()
}

fn addresses(list: &[&str]) -> DnsAnswer {
    DnsAnswer::Addresses(
        list.iter()
            .map(|address| address.parse().unwrap())
            .collect(),
    )
}

fn endpoints(answers: &DnsAnswers, names: &[DnsConfig]) -> Vec<String> {
    answers
        .workers(names)
        .iter()
        .map(|worker| worker.endpoint.to_string())
        .collect()
}

#[test]
fn name_resolves_to_both_address_families() {
    let names = [name("{name: engines, port: 8000}")];
    let mut answers = DnsAnswers::default();
    assert_eq!(
        answers.queries(&names[0]),
        [
            DnsQuery::A("engines".into()),
            DnsQuery::Aaaa("engines".into())
        ]
    );
    assert!(!answers.has_any());
    answers.insert(
        DnsQuery::A("engines".into()),
        addresses(&["10.0.0.2", "10.0.0.1"]),
    );
    assert_eq!(
        endpoints(&answers, &names),
        ["10.0.0.1:8000", "10.0.0.2:8000"]
    );
    answers.insert(
        DnsQuery::Aaaa("engines".into()),
        addresses(&["2001:db8::1"]),
    );
    assert_eq!(
        endpoints(&answers, &names),
        ["10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::1]:8000"]
    );
    answers.insert(DnsQuery::A("engines".into()), addresses(&[]));
    assert_eq!(endpoints(&answers, &names), ["[2001:db8::1]:8000"]);
}

#[test]
fn srv_targets_have_their_own_ports() {
    let names = [name("{name: _http._tcp.engines, record: srv}")];
    let service = DnsQuery::Srv("_http._tcp.engines".into());
    let mut answers = DnsAnswers::default();
    assert_eq!(answers.queries(&names[0]), std::slice::from_ref(&service));
    let port = |port| NonZeroU16::new(port).unwrap();
    let targets = [
        ("a.".to_owned(), port(8000)),
        ("a.".to_owned(), port(8001)),
        ("b.".to_owned(), port(9000)),
    ];
    answers.insert(service.clone(), DnsAnswer::Targets(targets.into()));
    assert_eq!(answers.queries(&names[0]).len(), 5);
    answers.insert(DnsQuery::A("a.".into()), addresses(&["10.0.0.1"]));
    answers.insert(DnsQuery::A("b.".into()), addresses(&["10.0.0.2"]));
    assert_eq!(
        endpoints(&answers, &names),
        ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:9000"]
    );
    // A removed SRV target is not queried any more, and its answer is removed.
    answers.insert(
        service,
        DnsAnswer::Targets([("b.".to_owned(), port(9000))].into()),
    );
    answers.retain(&names);
    assert_eq!(endpoints(&answers, &names), ["10.0.0.2:9000"]);
    assert!(!answers.last.contains_key(&DnsQuery::A("a.".into())));
}

#[test]
fn address_of_two_names_is_one_worker() {
    let names = [
        name("{name: decode, port: 8000, worker: {role: decode}}"),
        name("{name: all, port: 8000, worker: {role: prefill}}"),
    ];
    let mut answers = DnsAnswers::default();
    answers.insert(DnsQuery::A("decode".into()), addresses(&["10.0.0.1"]));
    answers.insert(
        DnsQuery::A("all".into()),
        addresses(&["10.0.0.1", "10.0.0.2"]),
    );
    let found = answers.workers(&names);
    let roles: Vec<_> = found
        .iter()
        .map(|worker| (worker.endpoint.to_string(), worker.role.to_string()))
        .collect();
    let expected = [("10.0.0.1:8000", "decode"), ("10.0.0.2:8000", "prefill")];
    assert_eq!(
        roles,
        expected.map(|(endpoint, role)| (endpoint.to_owned(), role.to_owned()))
    );
}

#[test]
fn dns_worker_id_is_stable_and_json_safe() {
    let ids: BTreeSet<u64> = (0..=255u8)
        .flat_map(|last| [8000, 8001].map(|port| SocketAddr::from(([10, 0, 0, last], port))))
        .map(|address| worker_id(address).0)
        .collect();
    assert_eq!(ids.len(), 512);
    assert!(ids.iter().all(|id| *id < 1 << 53));
    // The id must be equal on all replicas and in later versions.
    assert_eq!(worker_id("10.0.0.1:8000".parse().unwrap()).0, PINNED);
}

const PINNED: u64 = 6_231_458_367_655_430;

#[test]
fn discovered_worker_follows_template() {
    let names = [name(
        "{name: e, port: 8000, worker: {model: m, data_parallel: {size: 2}, kv_events: {port: 5557, replay_port: 5657, topic: kv}, \
         total_kv_blocks: 7, bootstrap: {port: 8999}}}",
    )];
    let mut answers = DnsAnswers::default();
    answers.insert(DnsQuery::Aaaa("e".into()), addresses(&["2001:db8::1"]));
    let models = [warmroute_server::fleet::discovery::WorkerModel {
        name: "m".into(),
        block_size: warmroute_core::worker::BlockSize::new(16).unwrap(),
        uses_bootstrap: false,
    }];
    let workers =
        warmroute_server::fleet::discovery::resolve(&answers.workers(&names), &models).unwrap();
    let sources: Vec<_> = workers[0]
        .event_sources
        .iter()
        .map(|source| source.endpoint.as_str())
        .collect();
    assert_eq!(
        sources,
        ["tcp://[2001:db8::1]:5557", "tcp://[2001:db8::1]:5558"]
    );
    assert_eq!(
        workers[0].event_sources[1].replay.as_deref(),
        Some("tcp://[2001:db8::1]:5658")
    );
    assert_eq!(workers[0].capacity.total_kv_blocks, Some(7));
    assert_eq!(
        workers[0].bootstrap_address(),
        ("2001:db8::1".to_owned(), 8999)
    );
}
