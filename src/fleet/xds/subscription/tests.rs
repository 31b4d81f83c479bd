use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use warmroute_core::worker::{BlockSize, Worker, WorkerId, WorkerRole};

use super::*;
use crate::fleet::xds::config::ClusterConfig;

/// Assignments of the clusters `a` to `d`: the given number of endpoints on each worker.
fn assignments(of: [u64; 4]) -> AssignmentSnapshot {
    let clusters = ["a", "b", "c", "d"];
    let roles = [
        WorkerRole::Aggregated,
        WorkerRole::Prefill,
        WorkerRole::Decode,
    ];
    let configured = clusters.map(|name| ClusterConfig {
        name: name.to_owned(),
        model: Some(name.into()),
        roles: BTreeSet::new(),
    });
    let worker = |(name, id): (&str, u64)| {
        let endpoint = format!("10.0.0.1:{}", 8000 + id).parse().unwrap();
        Worker {
            role: roles[id as usize % 3],
            ..Worker::new(
                WorkerId(id),
                endpoint,
                name.into(),
                BlockSize::new(16).unwrap(),
            )
        }
    };
    let workers: Vec<Worker> = clusters.into_iter().zip(of).map(worker).collect();
    AssignmentSnapshot::new(
        1,
        std::time::Instant::now(),
        &configured,
        &workers.iter().collect::<Vec<_>>(),
    )
}

fn exactly(names: &[&str]) -> SubscriptionChange {
    SubscriptionChange::Replace(names.iter().map(|name| (*name).to_owned()).collect())
}

fn change(subscribe: &[&str], unsubscribe: &[&str]) -> SubscriptionChange {
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    SubscriptionChange::Delta {
        subscribe: texts(subscribe),
        unsubscribe: texts(unsubscribe),
        initial_versions: BTreeMap::new(),
    }
}

fn says(nonce: &str, wants: SubscriptionChange) -> SubscriptionRequest {
    SubscriptionRequest {
        nonce: nonce.to_owned(),
        error_detail: None,
        change: wants,
    }
}

/// Next response: nonce, clusters, missing clusters.
fn told(
    subscription: &mut EndpointSubscription,
    now: &AssignmentSnapshot,
    absent: bool,
) -> Option<(String, Vec<String>, Vec<String>)> {
    let news = subscription.next_update(now, absent)?;
    Some((
        news.nonce,
        news.clusters.into_iter().map(|(name, _)| name).collect(),
        news.missing,
    ))
}

fn news(nonce: &str, clusters: &[&str]) -> Option<(String, Vec<String>, Vec<String>)> {
    Some((
        nonce.to_owned(),
        clusters.iter().map(|name| (*name).to_owned()).collect(),
        Vec::new(),
    ))
}

#[test]
fn subscriber_receives_resources_then_changes() {
    let mut subscription = EndpointSubscription::default();
    let now = assignments([1, 2, 3, 4]);
    assert_eq!(
        told(&mut subscription, &now, false),
        None,
        "nothing was asked"
    );
    assert_eq!(
        subscription.on_request(says("", exactly(&["a", "b"]))),
        AckOutcome::Query
    );
    assert_eq!(told(&mut subscription, &now, false), news("1", &["a", "b"]));
    let later = assignments([1, 5, 3, 4]);
    assert_eq!(
        told(&mut subscription, &later, false),
        None,
        "the first answer was not heard of yet"
    );
    assert!(!subscription.is_synced(&now));
    assert_eq!(
        subscription.on_request(says("1", exactly(&["a", "b"]))),
        AckOutcome::Ack
    );
    assert!(subscription.is_synced(&now) && !subscription.is_synced(&later));
    assert_eq!(told(&mut subscription, &later, false), news("2", &["b"]));
}

#[test]
fn rejected_resource_is_resent_only_after_change() {
    let mut subscription = EndpointSubscription::default();
    let now = assignments([1, 2, 3, 4]);
    subscription.on_request(says("", exactly(&["a"])));
    assert_eq!(told(&mut subscription, &now, false), news("1", &["a"]));
    let refusal = SubscriptionRequest {
        error_detail: Some("no".to_owned()),
        ..says("1", exactly(&["a"]))
    };
    assert_eq!(
        subscription.on_request(refusal),
        AckOutcome::Nack("no".to_owned())
    );
    assert_eq!(told(&mut subscription, &now, false), None);
    assert_eq!(
        told(&mut subscription, &assignments([7, 2, 3, 4]), false),
        news("2", &["a"])
    );
}

#[test]
fn stale_nonce_is_ignored() {
    let mut subscription = EndpointSubscription::default();
    let now = assignments([1, 2, 3, 4]);
    subscription.on_request(says("", exactly(&["a"])));
    told(&mut subscription, &now, false);
    for nonce in ["0", "2", "x"] {
        assert_eq!(
            subscription.on_request(says(nonce, exactly(&["b"]))),
            AckOutcome::Stale
        );
    }
    assert!(!subscription.is_synced(&now));
    assert_eq!(subscription.names().collect::<Vec<_>>(), ["a"]);
}

/// Envoy repeats the query when it has recreated the cluster, which waits for its endpoints.
#[test]
fn repeated_query_is_answered_again() {
    let now = assignments([1, 2, 3, 4]);
    let mut world = EndpointSubscription::default();
    world.on_request(says("", exactly(&["a", "b"])));
    told(&mut world, &now, false);
    world.on_request(says("1", exactly(&["a", "b"])));
    assert_eq!(told(&mut world, &now, false), None);
    world.on_request(says("1", exactly(&["a", "b"])));
    assert_eq!(told(&mut world, &now, false), news("2", &["a", "b"]));
    // Removing a name sends nothing.
    world.on_request(says("2", exactly(&["a", "b"])));
    world.on_request(says("2", exactly(&["a"])));
    assert_eq!(told(&mut world, &now, false), None);
    world.on_request(says("2", exactly(&["a", "b"])));
    assert_eq!(told(&mut world, &now, false), news("3", &["b"]));

    let mut delta = EndpointSubscription::default();
    delta.on_request(says("", change(&["a"], &[])));
    told(&mut delta, &now, true);
    delta.on_request(says("1", change(&[], &[])));
    assert_eq!(told(&mut delta, &now, true), None);
    delta.on_request(says("", change(&["a"], &[])));
    assert_eq!(told(&mut delta, &now, true), news("2", &["a"]));
}

#[test]
fn reconnect_receives_only_outdated_resources() {
    let now = assignments([1, 2, 3, 4]);
    let version = |name: &str| now.clusters[name].version.to_string();
    let initial_versions = [
        ("a".to_owned(), version("a")),
        ("b".to_owned(), "old".to_owned()),
    ]
    .into();
    let mut subscription = EndpointSubscription::default();
    let wants = SubscriptionChange::Delta {
        subscribe: vec!["a".to_owned(), "b".to_owned()],
        unsubscribe: Vec::new(),
        initial_versions,
    };
    subscription.on_request(says("", wants));
    assert_eq!(told(&mut subscription, &now, true), news("1", &["b"]));
}

#[test]
fn missing_resource_is_reported_once_in_delta() {
    let now = assignments([1, 2, 3, 4]);
    for absent in [false, true] {
        let mut subscription = EndpointSubscription::default();
        subscription.on_request(says("", change(&["x"], &[])));
        let expected = absent.then(|| ("1".to_owned(), Vec::new(), vec!["x".to_owned()]));
        assert_eq!(told(&mut subscription, &now, absent), expected);
        subscription.on_request(says(if absent { "1" } else { "" }, change(&[], &[])));
        assert_eq!(told(&mut subscription, &now, absent), None);
        assert!(subscription.is_synced(&now));
    }
}

#[test]
fn empty_first_request_is_wildcard() {
    let now = assignments([1, 2, 3, 4]);
    for wants in [
        exactly(&[]),
        change(&[], &[]),
        exactly(&["*"]),
        change(&["*"], &[]),
    ] {
        let mut subscription = EndpointSubscription::default();
        subscription.on_request(says("", wants));
        assert_eq!(
            told(&mut subscription, &now, true),
            news("1", &["a", "b", "c", "d"])
        );
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Requests other clusters.
    Wants(BTreeSet<usize>),
    /// Changes the fleet.
    Changes([u64; 4]),
    /// Acknowledges the response, or rejects it if false.
    Answers(bool),
    /// Sends a stale nonce.
    Stale,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        btree_set(0..5usize, 1..5).prop_map(Step::Wants),
        [0..3u64, 3..6u64, 6..9u64, 9..12u64].prop_map(Step::Changes),
        any::<bool>().prop_map(Step::Answers),
        Just(Step::Stale),
    ]
}

/// Simulated Envoy in both variants.
struct Client {
    delta: bool,
    wants: BTreeSet<String>,
    initial_versions: BTreeMap<String, String>,
    last: String,
    open: Option<BTreeMap<String, String>>,
}

impl Client {
    /// Builds the next request, given the previously requested clusters.
    fn says(&self, before: &BTreeSet<String>) -> SubscriptionRequest {
        let wants = if self.delta {
            let subscribe = self.wants.difference(before).cloned().collect();
            let unsubscribe = before.difference(&self.wants).cloned().collect();
            SubscriptionChange::Delta {
                subscribe,
                unsubscribe,
                initial_versions: BTreeMap::new(),
            }
        } else {
            SubscriptionChange::Replace(self.wants.clone())
        };
        let nonce = if self.delta {
            String::new()
        } else {
            self.last.clone()
        };
        SubscriptionRequest {
            nonce,
            error_detail: None,
            change: wants,
        }
    }
}

proptest! {
    /// After any steps, a client that acknowledges everything has the current resources, and only
    /// one response is open at a time.
    #[test]
    fn subscriptions_converge(delta: bool, steps in vec(step(), 0..40)) {
        let names = ["a", "b", "c", "d", "x"];
        let mut now = assignments([0, 3, 6, 9]);
        let mut subscription = EndpointSubscription::default();
        let mut client = Client {
            delta,
            wants: BTreeSet::new(),
            initial_versions: BTreeMap::new(),
            last: String::new(),
            open: None,
        };
        let answers = || [Step::Answers(true), Step::Answers(true)];
        let rest = answers().into_iter().chain([Step::Wants([0, 1, 2].into())]).chain(answers());
        let rest = rest.chain([Step::Changes([20, 21, 22, 23])]).chain(answers());
        for step in steps.into_iter().chain(rest) {
            match step {
                Step::Wants(at) => {
                    // Envoy answers the open response before it sends another request.
                    if client.open.is_some() && !delta {
                        continue;
                    }
                    let wants: BTreeSet<String> = at.into_iter().map(|at| names[at].to_owned()).collect();
                    let before = std::mem::replace(&mut client.wants, wants);
                    client.initial_versions.retain(|name, _| client.wants.contains(name));
                    let said = client.says(&before);
                    subscription.on_request(said);
                }
                Step::Changes(of) => now = assignments(of),
                Step::Answers(takes) => {
                    let Some(told) = client.open.take() else { continue };
                    if takes {
                        client.initial_versions.extend(told.into_iter().filter(|(name, _)| client.wants.contains(name)));
                    }
                    let refusal = (!takes).then(|| "no".to_owned());
                    let said = client.says(&client.wants.clone());
                    subscription.on_request(SubscriptionRequest { nonce: client.last.clone(), error_detail: refusal, ..said });
                }
                Step::Stale => {
                    let said = client.says(&client.wants.clone());
                    let word = subscription.on_request(SubscriptionRequest { nonce: "999".to_owned(), ..said });
                    prop_assert_eq!(word, AckOutcome::Stale);
                }
            }
            if let Some(news) = subscription.next_update(&now, delta) {
                prop_assert!(client.open.is_none(), "two answers at a time");
                client.last = news.nonce.clone();
                let told = news.clusters.iter().map(|(name, assignment)| (name.clone(), assignment.version.to_string()));
                client.open = Some(told.collect());
            }
        }
        prop_assert!(client.open.is_none() && subscription.is_synced(&now));
        for name in ["a", "b", "c"] {
            prop_assert_eq!(client.initial_versions.get(name), Some(&now.clusters[name].version.to_string()), "{}", name);
        }
    }
}

#[test]
fn stream_with_too_many_clusters_is_rejected() {
    let names: Vec<String> = (0..=MAX_NAMES)
        .map(|number| format!("cluster-{number}"))
        .collect();
    let mut delta = EndpointSubscription::default();
    let (last, fitting) = names.split_last().unwrap();
    for name in fitting {
        assert_eq!(
            delta.on_request(says("", change(&[name], &[]))),
            AckOutcome::Query
        );
    }
    assert_eq!(
        delta.on_request(says("", change(&[last], &[]))),
        AckOutcome::TooManyNames
    );
    let mut whole = EndpointSubscription::default();
    assert_eq!(
        whole.on_request(says(
            "",
            SubscriptionChange::Replace(names.iter().cloned().collect())
        )),
        AckOutcome::TooManyNames
    );
    let mut resumed = EndpointSubscription::default();
    let initial_versions = names
        .into_iter()
        .map(|name| (name, "1".to_owned()))
        .collect();
    let wants = SubscriptionChange::Delta {
        subscribe: Vec::new(),
        unsubscribe: Vec::new(),
        initial_versions,
    };
    assert_eq!(
        resumed.on_request(says("", wants)),
        AckOutcome::TooManyNames
    );
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    assert_eq!(
        EndpointSubscription::default().on_request(says("", exactly(&[&long]))),
        AckOutcome::TooManyNames
    );
}
