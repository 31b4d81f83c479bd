use super::*;

fn name(text: &str) -> DnsConfig {
    serde_saphyr::from_str(text).unwrap()
}

fn addresses(list: &[&str]) -> Answer {
    Answer::Addresses(
        list.iter()
            .map(|address| address.parse().unwrap())
            .collect(),
    )
}

fn endpoints(answers: &Answers, names: &[DnsConfig]) -> Vec<String> {
    answers
        .workers(names)
        .iter()
        .map(|worker| worker.endpoint.to_string())
        .collect()
}

#[test]
fn a_name_is_the_addresses_of_both_families() {
    let names = [name("{name: engines, port: 8000}")];
    let mut answers = Answers::default();
    assert_eq!(
        answers.questions(&names[0]),
        [
            Question::V4("engines".into()),
            Question::V6("engines".into())
        ]
    );
    assert!(!answers.has_any());
    answers.take(
        Question::V4("engines".into()),
        addresses(&["10.0.0.2", "10.0.0.1"]),
    );
    assert_eq!(
        endpoints(&answers, &names),
        ["10.0.0.1:8000", "10.0.0.2:8000"]
    );
    answers.take(Question::V6("engines".into()), addresses(&["2001:db8::1"]));
    assert_eq!(
        endpoints(&answers, &names),
        ["10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::1]:8000"]
    );
    answers.take(Question::V4("engines".into()), addresses(&[]));
    assert_eq!(endpoints(&answers, &names), ["[2001:db8::1]:8000"]);
}

#[test]
fn a_service_is_its_targets_each_with_its_port() {
    let names = [name("{name: _http._tcp.engines, record: srv}")];
    let service = Question::Service("_http._tcp.engines".into());
    let mut answers = Answers::default();
    assert_eq!(answers.questions(&names[0]), std::slice::from_ref(&service));
    let port = |port| NonZeroU16::new(port).unwrap();
    let targets = [
        ("a.".to_owned(), port(8000)),
        ("a.".to_owned(), port(8001)),
        ("b.".to_owned(), port(9000)),
    ];
    answers.take(service.clone(), Answer::Targets(targets.into()));
    assert_eq!(answers.questions(&names[0]).len(), 5);
    answers.take(Question::V4("a.".into()), addresses(&["10.0.0.1"]));
    answers.take(Question::V4("b.".into()), addresses(&["10.0.0.2"]));
    assert_eq!(
        endpoints(&answers, &names),
        ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:9000"]
    );
    // Whoever is no target any more is not asked for, and forgotten.
    answers.take(
        service,
        Answer::Targets([("b.".to_owned(), port(9000))].into()),
    );
    answers.keep(&names);
    assert_eq!(endpoints(&answers, &names), ["10.0.0.2:9000"]);
    assert!(!answers.last.contains_key(&Question::V4("a.".into())));
}

#[test]
fn an_address_that_two_names_have_is_one_worker() {
    let names = [
        name("{name: decode, port: 8000, worker: {role: decode}}"),
        name("{name: all, port: 8000, worker: {role: prefill}}"),
    ];
    let mut answers = Answers::default();
    answers.take(Question::V4("decode".into()), addresses(&["10.0.0.1"]));
    answers.take(
        Question::V4("all".into()),
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
fn an_id_is_the_address_and_survives_json() {
    let ids: BTreeSet<u64> = (0..=255u8)
        .flat_map(|last| [8000, 8001].map(|port| SocketAddr::from(([10, 0, 0, last], port))))
        .map(|address| worker_id(address).0)
        .collect();
    assert_eq!(ids.len(), 512);
    assert!(ids.iter().all(|id| *id < 1 << 53));
    // What other replicas and later versions make of it must be the same.
    assert_eq!(worker_id("10.0.0.1:8000".parse().unwrap()).0, PINNED);
}

const PINNED: u64 = 6_231_458_367_655_430;

#[test]
fn a_found_worker_is_like_its_template() {
    let names = [name(
        "{name: e, port: 8000, worker: {model: m, ranks: 2, kv_events: {port: 5557, replay_port: 5657, topic: kv}, \
         total_kv_blocks: 7, bootstrap_port: 8999}}",
    )];
    let mut answers = Answers::default();
    answers.take(Question::V6("e".into()), addresses(&["2001:db8::1"]));
    let models = [crate::discovery::ServedModel {
        name: "m".into(),
        block_size: crate::worker::BlockSize::new(16).unwrap(),
        meets: false,
    }];
    let workers = crate::discovery::resolve(&answers.workers(&names), &models).unwrap();
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
    assert_eq!(workers[0].meeting_place(), ("2001:db8::1".to_owned(), 8999));
}
