use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::*;
use crate::worker::{BlockSize, Role, Worker, WorkerId};
use crate::xds::config::ClusterConfig;

/// Endpoints of the clusters `a` to `d`, the first so many of each on the worker with this number.
fn assignments(of: [u64; 4]) -> Assignments {
    let clusters = ["a", "b", "c", "d"];
    let roles = [Role::Aggregated, Role::Prefill, Role::Decode];
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
    Assignments::new(
        1,
        std::time::Instant::now(),
        &configured,
        &workers.iter().collect::<Vec<_>>(),
    )
}

fn exactly(names: &[&str]) -> Wants {
    Wants::Exactly(names.iter().map(|name| (*name).to_owned()).collect())
}

fn change(more: &[&str], less: &[&str]) -> Wants {
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Wants::Change {
        more: texts(more),
        less: texts(less),
        has: BTreeMap::new(),
    }
}

fn says(nonce: &str, wants: Wants) -> Heard {
    Heard {
        nonce: nonce.to_owned(),
        refusal: None,
        wants,
    }
}

/// What is told next: its nonce, the clusters, and those that are not known.
fn told(
    subscription: &mut Subscription,
    now: &Assignments,
    absent: bool,
) -> Option<(String, Vec<String>, Vec<String>)> {
    let news = subscription.next(now, absent)?;
    Some((
        news.nonce,
        news.clusters.into_iter().map(|(name, _)| name).collect(),
        news.absent,
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
fn whoever_asks_is_told_and_then_of_changes_only() {
    let mut subscription = Subscription::default();
    let now = assignments([1, 2, 3, 4]);
    assert_eq!(
        told(&mut subscription, &now, false),
        None,
        "nothing was asked"
    );
    assert_eq!(
        subscription.hear(says("", exactly(&["a", "b"]))),
        Word::Asks
    );
    assert_eq!(told(&mut subscription, &now, false), news("1", &["a", "b"]));
    let later = assignments([1, 5, 3, 4]);
    assert_eq!(
        told(&mut subscription, &later, false),
        None,
        "the first answer was not heard of yet"
    );
    assert!(!subscription.is_settled(&now));
    assert_eq!(
        subscription.hear(says("1", exactly(&["a", "b"]))),
        Word::Accepts
    );
    assert!(subscription.is_settled(&now) && !subscription.is_settled(&later));
    assert_eq!(told(&mut subscription, &later, false), news("2", &["b"]));
}

#[test]
fn what_was_refused_is_not_told_again_before_it_changes() {
    let mut subscription = Subscription::default();
    let now = assignments([1, 2, 3, 4]);
    subscription.hear(says("", exactly(&["a"])));
    assert_eq!(told(&mut subscription, &now, false), news("1", &["a"]));
    let refusal = Heard {
        refusal: Some("no".to_owned()),
        ..says("1", exactly(&["a"]))
    };
    assert_eq!(subscription.hear(refusal), Word::Refuses("no".to_owned()));
    assert_eq!(told(&mut subscription, &now, false), None);
    assert_eq!(
        told(&mut subscription, &assignments([7, 2, 3, 4]), false),
        news("2", &["a"])
    );
}

#[test]
fn an_answer_to_an_older_one_says_nothing() {
    let mut subscription = Subscription::default();
    let now = assignments([1, 2, 3, 4]);
    subscription.hear(says("", exactly(&["a"])));
    told(&mut subscription, &now, false);
    for nonce in ["0", "2", "x"] {
        assert_eq!(subscription.hear(says(nonce, exactly(&["b"]))), Word::Stale);
    }
    assert!(!subscription.is_settled(&now));
    assert_eq!(subscription.names().collect::<Vec<_>>(), ["a"]);
}

/// Envoy does so when the cluster itself was changed, and the new one waits for its endpoints.
#[test]
fn whoever_asks_again_for_the_same_is_told_again() {
    let now = assignments([1, 2, 3, 4]);
    let mut world = Subscription::default();
    world.hear(says("", exactly(&["a", "b"])));
    told(&mut world, &now, false);
    world.hear(says("1", exactly(&["a", "b"])));
    assert_eq!(told(&mut world, &now, false), None);
    world.hear(says("1", exactly(&["a", "b"])));
    assert_eq!(told(&mut world, &now, false), news("2", &["a", "b"]));
    // And fewer is only fewer.
    world.hear(says("2", exactly(&["a", "b"])));
    world.hear(says("2", exactly(&["a"])));
    assert_eq!(told(&mut world, &now, false), None);
    world.hear(says("2", exactly(&["a", "b"])));
    assert_eq!(told(&mut world, &now, false), news("3", &["b"]));

    let mut delta = Subscription::default();
    delta.hear(says("", change(&["a"], &[])));
    told(&mut delta, &now, true);
    delta.hear(says("1", change(&[], &[])));
    assert_eq!(told(&mut delta, &now, true), None);
    delta.hear(says("", change(&["a"], &[])));
    assert_eq!(told(&mut delta, &now, true), news("2", &["a"]));
}

#[test]
fn who_comes_back_is_told_what_it_has_not() {
    let now = assignments([1, 2, 3, 4]);
    let version = |name: &str| now.clusters[name].version.to_string();
    let has = [
        ("a".to_owned(), version("a")),
        ("b".to_owned(), "old".to_owned()),
    ]
    .into();
    let mut subscription = Subscription::default();
    let wants = Wants::Change {
        more: vec!["a".to_owned(), "b".to_owned()],
        less: Vec::new(),
        has,
    };
    subscription.hear(says("", wants));
    assert_eq!(told(&mut subscription, &now, true), news("1", &["b"]));
}

#[test]
fn what_we_do_not_know_is_told_once_where_the_protocol_can_say_it() {
    let now = assignments([1, 2, 3, 4]);
    for absent in [false, true] {
        let mut subscription = Subscription::default();
        subscription.hear(says("", change(&["x"], &[])));
        let expected = absent.then(|| ("1".to_owned(), Vec::new(), vec!["x".to_owned()]));
        assert_eq!(told(&mut subscription, &now, absent), expected);
        subscription.hear(says(if absent { "1" } else { "" }, change(&[], &[])));
        assert_eq!(told(&mut subscription, &now, absent), None);
        assert!(subscription.is_settled(&now));
    }
}

#[test]
fn nobody_named_at_first_is_everybody() {
    let now = assignments([1, 2, 3, 4]);
    for wants in [
        exactly(&[]),
        change(&[], &[]),
        exactly(&["*"]),
        change(&["*"], &[]),
    ] {
        let mut subscription = Subscription::default();
        subscription.hear(says("", wants));
        assert_eq!(
            told(&mut subscription, &now, true),
            news("1", &["a", "b", "c", "d"])
        );
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Asks for other clusters.
    Wants(BTreeSet<usize>),
    /// The fleet changes.
    Changes([u64; 4]),
    /// Takes what was told; `false`: refuses it.
    Answers(bool),
    /// What comes too late.
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

/// What an Envoy does with what it is told, in both variants.
struct Client {
    delta: bool,
    wants: BTreeSet<String>,
    has: BTreeMap<String, String>,
    last: String,
    open: Option<BTreeMap<String, String>>,
}

impl Client {
    /// What it says with its next request, having wanted other clusters before.
    fn says(&self, before: &BTreeSet<String>) -> Heard {
        let wants = if self.delta {
            let more = self.wants.difference(before).cloned().collect();
            let less = before.difference(&self.wants).cloned().collect();
            Wants::Change {
                more,
                less,
                has: BTreeMap::new(),
            }
        } else {
            Wants::Exactly(self.wants.clone())
        };
        let nonce = if self.delta {
            String::new()
        } else {
            self.last.clone()
        };
        Heard {
            nonce,
            refusal: None,
            wants,
        }
    }
}

proptest! {
    /// Whatever happens in between: who takes everything has in the end what there is, and one answer is open at a time.
    #[test]
    fn in_the_end_everybody_has_what_there_is(delta: bool, steps in vec(step(), 0..40)) {
        let names = ["a", "b", "c", "d", "x"];
        let mut now = assignments([0, 3, 6, 9]);
        let mut subscription = Subscription::default();
        let mut client = Client {
            delta,
            wants: BTreeSet::new(),
            has: BTreeMap::new(),
            last: String::new(),
            open: None,
        };
        let answers = || [Step::Answers(true), Step::Answers(true)];
        let rest = answers().into_iter().chain([Step::Wants([0, 1, 2].into())]).chain(answers());
        let rest = rest.chain([Step::Changes([20, 21, 22, 23])]).chain(answers());
        for step in steps.into_iter().chain(rest) {
            match step {
                Step::Wants(at) => {
                    // Envoy answers what it has heard before it says anything else.
                    if client.open.is_some() && !delta {
                        continue;
                    }
                    let wants: BTreeSet<String> = at.into_iter().map(|at| names[at].to_owned()).collect();
                    let before = std::mem::replace(&mut client.wants, wants);
                    client.has.retain(|name, _| client.wants.contains(name));
                    let said = client.says(&before);
                    subscription.hear(said);
                }
                Step::Changes(of) => now = assignments(of),
                Step::Answers(takes) => {
                    let Some(told) = client.open.take() else { continue };
                    if takes {
                        client.has.extend(told.into_iter().filter(|(name, _)| client.wants.contains(name)));
                    }
                    let refusal = (!takes).then(|| "no".to_owned());
                    let said = client.says(&client.wants.clone());
                    subscription.hear(Heard { nonce: client.last.clone(), refusal, ..said });
                }
                Step::Stale => {
                    let said = client.says(&client.wants.clone());
                    let word = subscription.hear(Heard { nonce: "999".to_owned(), ..said });
                    prop_assert_eq!(word, Word::Stale);
                }
            }
            if let Some(news) = subscription.next(&now, delta) {
                prop_assert!(client.open.is_none(), "two answers at a time");
                client.last = news.nonce.clone();
                let told = news.clusters.iter().map(|(name, assignment)| (name.clone(), assignment.version.to_string()));
                client.open = Some(told.collect());
            }
        }
        prop_assert!(client.open.is_none() && subscription.is_settled(&now));
        for name in ["a", "b", "c"] {
            prop_assert_eq!(client.has.get(name), Some(&now.clusters[name].version.to_string()), "{}", name);
        }
    }
}

#[test]
fn stream_that_names_too_many_clusters_is_refused() {
    let names: Vec<String> = (0..=MOST_NAMES)
        .map(|number| format!("cluster-{number}"))
        .collect();
    let mut delta = Subscription::default();
    let (last, fitting) = names.split_last().unwrap();
    for name in fitting {
        assert_eq!(delta.hear(says("", change(&[name], &[]))), Word::Asks);
    }
    assert_eq!(
        delta.hear(says("", change(&[last], &[]))),
        Word::TooManyNames
    );
    let mut whole = Subscription::default();
    assert_eq!(
        whole.hear(says("", Wants::Exactly(names.iter().cloned().collect()))),
        Word::TooManyNames
    );
    let mut resumed = Subscription::default();
    let has = names
        .into_iter()
        .map(|name| (name, "1".to_owned()))
        .collect();
    let wants = Wants::Change {
        more: Vec::new(),
        less: Vec::new(),
        has,
    };
    assert_eq!(resumed.hear(says("", wants)), Word::TooManyNames);
    let long = "x".repeat(MOST_NAME_BYTES + 1);
    assert_eq!(
        Subscription::default().hear(says("", exactly(&[&long]))),
        Word::TooManyNames
    );
}
