use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use warmroute_core::worker::{BlockSize, Worker, WorkerId, WorkerRole};

use super::*;
use crate::fleet::xds::config::ClusterConfig;

/// Returns the assignments of the clusters `a` to `d`. Each has one worker, with the given id.
fn assignments(worker_ids: [u64; 4]) -> AssignmentSnapshot {
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
    let workers: Vec<Worker> = clusters.into_iter().zip(worker_ids).map(worker).collect();
    AssignmentSnapshot::new(
        1,
        std::time::Instant::now(),
        &configured,
        &workers.iter().collect::<Vec<_>>(),
    )
}

fn replace(names: &[&str]) -> SubscriptionChange {
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

/// Returns a request that acknowledges the response with this nonce.
fn request(nonce: &str, change: SubscriptionChange) -> SubscriptionRequest {
    SubscriptionRequest {
        nonce: nonce.to_owned(),
        error_detail: None,
        change,
    }
}

/// Returns the next response: nonce, clusters, missing clusters.
fn next_update(
    subscription: &mut EndpointSubscription,
    now: &AssignmentSnapshot,
    reports_missing: bool,
) -> Option<(String, Vec<String>, Vec<String>)> {
    let update = subscription.next_update(now, reports_missing)?;
    Some((
        update.nonce,
        update.clusters.into_iter().map(|(name, _)| name).collect(),
        update.missing,
    ))
}

/// Returns an expected response without missing clusters.
fn update(nonce: &str, clusters: &[&str]) -> Option<(String, Vec<String>, Vec<String>)> {
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
        next_update(&mut subscription, &now, false),
        None,
        "nothing was requested"
    );
    assert_eq!(
        subscription.on_request(request("", replace(&["a", "b"]))),
        AckOutcome::Query
    );
    assert_eq!(
        next_update(&mut subscription, &now, false),
        update("1", &["a", "b"])
    );
    let later = assignments([1, 5, 3, 4]);
    assert_eq!(
        next_update(&mut subscription, &later, false),
        None,
        "the first response is not acknowledged yet"
    );
    assert!(!subscription.is_synced(&now));
    assert_eq!(
        subscription.on_request(request("1", replace(&["a", "b"]))),
        AckOutcome::Ack
    );
    assert!(subscription.is_synced(&now) && !subscription.is_synced(&later));
    assert_eq!(
        next_update(&mut subscription, &later, false),
        update("2", &["b"])
    );
}

#[test]
fn rejected_resource_is_resent_only_after_change() {
    let mut subscription = EndpointSubscription::default();
    let now = assignments([1, 2, 3, 4]);
    subscription.on_request(request("", replace(&["a"])));
    assert_eq!(
        next_update(&mut subscription, &now, false),
        update("1", &["a"])
    );
    let refusal = SubscriptionRequest {
        error_detail: Some("no".to_owned()),
        ..request("1", replace(&["a"]))
    };
    assert_eq!(
        subscription.on_request(refusal),
        AckOutcome::Nack("no".to_owned())
    );
    assert_eq!(next_update(&mut subscription, &now, false), None);
    assert_eq!(
        next_update(&mut subscription, &assignments([7, 2, 3, 4]), false),
        update("2", &["a"])
    );
}

/// Envoy repeats the query when it has recreated the cluster, which waits for its endpoints.
#[test]
fn repeated_query_is_answered_again() {
    let now = assignments([1, 2, 3, 4]);
    let mut state_of_the_world = EndpointSubscription::default();
    state_of_the_world.on_request(request("", replace(&["a", "b"])));
    next_update(&mut state_of_the_world, &now, false);
    state_of_the_world.on_request(request("1", replace(&["a", "b"])));
    assert_eq!(next_update(&mut state_of_the_world, &now, false), None);
    state_of_the_world.on_request(request("1", replace(&["a", "b"])));
    assert_eq!(
        next_update(&mut state_of_the_world, &now, false),
        update("2", &["a", "b"])
    );
    // Removing a name sends nothing.
    state_of_the_world.on_request(request("2", replace(&["a", "b"])));
    state_of_the_world.on_request(request("2", replace(&["a"])));
    assert_eq!(next_update(&mut state_of_the_world, &now, false), None);
    state_of_the_world.on_request(request("2", replace(&["a", "b"])));
    assert_eq!(
        next_update(&mut state_of_the_world, &now, false),
        update("3", &["b"])
    );

    let mut delta = EndpointSubscription::default();
    delta.on_request(request("", change(&["a"], &[])));
    next_update(&mut delta, &now, true);
    delta.on_request(request("1", change(&[], &[])));
    assert_eq!(next_update(&mut delta, &now, true), None);
    delta.on_request(request("", change(&["a"], &[])));
    assert_eq!(next_update(&mut delta, &now, true), update("2", &["a"]));
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
    let change = SubscriptionChange::Delta {
        subscribe: vec!["a".to_owned(), "b".to_owned()],
        unsubscribe: Vec::new(),
        initial_versions,
    };
    subscription.on_request(request("", change));
    assert_eq!(
        next_update(&mut subscription, &now, true),
        update("1", &["b"])
    );
}

#[test]
fn missing_resource_is_reported_once_in_delta() {
    let now = assignments([1, 2, 3, 4]);
    for reports_missing in [false, true] {
        let mut subscription = EndpointSubscription::default();
        subscription.on_request(request("", change(&["x"], &[])));
        let expected = reports_missing.then(|| ("1".to_owned(), Vec::new(), vec!["x".to_owned()]));
        assert_eq!(
            next_update(&mut subscription, &now, reports_missing),
            expected
        );
        subscription.on_request(request(
            if reports_missing { "1" } else { "" },
            change(&[], &[]),
        ));
        assert_eq!(next_update(&mut subscription, &now, reports_missing), None);
        assert!(subscription.is_synced(&now));
    }
}

#[test]
fn empty_first_request_is_wildcard() {
    let now = assignments([1, 2, 3, 4]);
    for change in [
        replace(&[]),
        change(&[], &[]),
        replace(&["*"]),
        change(&["*"], &[]),
    ] {
        let mut subscription = EndpointSubscription::default();
        subscription.on_request(request("", change));
        assert_eq!(
            next_update(&mut subscription, &now, true),
            update("1", &["a", "b", "c", "d"])
        );
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Requests other clusters.
    Subscribe(BTreeSet<usize>),
    /// Changes the fleet.
    ChangeFleet([u64; 4]),
    /// Acknowledges the response if true, or rejects it.
    Respond(bool),
    /// Sends a stale nonce.
    Stale,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        btree_set(0..5usize, 1..5).prop_map(Step::Subscribe),
        [0..3u64, 3..6u64, 6..9u64, 9..12u64].prop_map(Step::ChangeFleet),
        any::<bool>().prop_map(Step::Respond),
        Just(Step::Stale),
    ]
}

/// Simulated Envoy in both variants.
struct Client {
    delta: bool,
    names: BTreeSet<String>,
    initial_versions: BTreeMap<String, String>,
    last_nonce: String,
    open: Option<BTreeMap<String, String>>,
}

impl Client {
    /// Builds the next request, given the previously requested clusters.
    fn build_request(&self, before: &BTreeSet<String>) -> SubscriptionRequest {
        let change = if self.delta {
            let subscribe = self.names.difference(before).cloned().collect();
            let unsubscribe = before.difference(&self.names).cloned().collect();
            SubscriptionChange::Delta {
                subscribe,
                unsubscribe,
                initial_versions: BTreeMap::new(),
            }
        } else {
            SubscriptionChange::Replace(self.names.clone())
        };
        let nonce = if self.delta {
            String::new()
        } else {
            self.last_nonce.clone()
        };
        SubscriptionRequest {
            nonce,
            error_detail: None,
            change,
        }
    }
}

proptest! {
    /// After any steps, a client that acknowledges everything has the current resources. At most
    /// one response is unacknowledged at a time.
    #[test]
    fn subscriptions_converge(delta: bool, steps in vec(step(), 0..40)) {
        let names = ["a", "b", "c", "d", "x"];
        let mut now = assignments([0, 3, 6, 9]);
        let mut subscription = EndpointSubscription::default();
        let mut client = Client {
            delta,
            names: BTreeSet::new(),
            initial_versions: BTreeMap::new(),
            last_nonce: String::new(),
            open: None,
        };
        let accept_all = || [Step::Respond(true), Step::Respond(true)];
        let final_steps = accept_all().into_iter().chain([Step::Subscribe([0, 1, 2].into())]).chain(accept_all());
        let final_steps = final_steps.chain([Step::ChangeFleet([20, 21, 22, 23])]).chain(accept_all());
        for step in steps.into_iter().chain(final_steps) {
            match step {
                Step::Subscribe(at) => {
                    // In the state-of-the-world variant, Envoy responds to the open response before
                    // it changes its subscription.
                    if client.open.is_some() && !delta {
                        continue;
                    }
                    let requested: BTreeSet<String> = at.into_iter().map(|at| names[at].to_owned()).collect();
                    let before = std::mem::replace(&mut client.names, requested);
                    client.initial_versions.retain(|name, _| client.names.contains(name));
                    let request = client.build_request(&before);
                    subscription.on_request(request);
                }
                Step::ChangeFleet(worker_ids) => now = assignments(worker_ids),
                Step::Respond(is_accepted) => {
                    let Some(versions) = client.open.take() else { continue };
                    if is_accepted {
                        client.initial_versions.extend(versions.into_iter().filter(|(name, _)| client.names.contains(name)));
                    }
                    let refusal = (!is_accepted).then(|| "no".to_owned());
                    let request = client.build_request(&client.names.clone());
                    subscription.on_request(SubscriptionRequest { nonce: client.last_nonce.clone(), error_detail: refusal, ..request });
                }
                Step::Stale => {
                    let request = client.build_request(&client.names.clone());
                    let outcome = subscription.on_request(SubscriptionRequest { nonce: "999".to_owned(), ..request });
                    prop_assert_eq!(outcome, AckOutcome::Stale);
                }
            }
            if let Some(update) = subscription.next_update(&now, delta) {
                prop_assert!(client.open.is_none(), "two unacknowledged responses");
                client.last_nonce = update.nonce.clone();
                let versions = update.clusters.iter().map(|(name, assignment)| (name.clone(), assignment.version.to_string()));
                client.open = Some(versions.collect());
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
            delta.on_request(request("", change(&[name], &[]))),
            AckOutcome::Query
        );
    }
    assert_eq!(
        delta.on_request(request("", change(&[last], &[]))),
        AckOutcome::TooManyNames
    );
    let mut state_of_the_world = EndpointSubscription::default();
    assert_eq!(
        state_of_the_world.on_request(request(
            "",
            SubscriptionChange::Replace(names.iter().cloned().collect())
        )),
        AckOutcome::TooManyNames
    );
    let mut reconnected = EndpointSubscription::default();
    let initial_versions = names
        .into_iter()
        .map(|name| (name, "1".to_owned()))
        .collect();
    let change = SubscriptionChange::Delta {
        subscribe: Vec::new(),
        unsubscribe: Vec::new(),
        initial_versions,
    };
    assert_eq!(
        reconnected.on_request(request("", change)),
        AckOutcome::TooManyNames
    );
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    assert_eq!(
        EndpointSubscription::default().on_request(request("", replace(&[&long]))),
        AckOutcome::TooManyNames
    );
}
