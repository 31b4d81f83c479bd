//! Request rules from the optional objects.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;

fn served_pools() -> Vec<ServedPool> {
    let pool = |title: &str, namespace: &str, name: &str| ServedPool {
        title: title.into(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    vec![
        pool("p", "inference", "p"),
        pool("other/p", "other", "p"),
        pool("q", "inference", "q"),
    ]
}

fn objects<K: DeserializeOwned>(all: &[Value]) -> ObjectsByNamespace<K> {
    let mut objects = ObjectsByNamespace::new();
    for (number, object) in all.iter().enumerate() {
        let namespace = object["metadata"]["namespace"].as_str().unwrap().to_owned();
        let of_namespace: &mut BTreeMap<String, K> = objects.entry(namespace).or_default();
        // The order of the map differs from the order by age.
        of_namespace.insert(
            format!("{:03}", 999 - number),
            serde_json::from_value(object.clone()).unwrap(),
        );
    }
    objects
}

fn object(namespace: &str, name: &str, created: &str, spec: &Value) -> Value {
    let metadata =
        json!({"namespace": namespace, "name": name, "uid": name, "creationTimestamp": created});
    json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "X", "metadata": metadata, "spec": spec})
}

#[test]
fn objectives_belong_to_pools_of_their_namespace() {
    let objective = |namespace: &str, name: &str, spec: Value| {
        object(namespace, name, "2026-01-01T00:00:00Z", &spec)
    };
    let group = "inference.networking.k8s.io";
    let all = objects(&[
        objective(
            "inference",
            "gold",
            json!({"priority": 10, "poolRef": {"group": group, "name": "p"}}),
        ),
        objective(
            "inference",
            "batch",
            json!({"priority": -1, "poolRef": {"name": "p"}}),
        ),
        objective("inference", "unset", json!({"poolRef": {"name": "q"}})),
        objective(
            "inference",
            "unknown-pool",
            json!({"priority": 1, "poolRef": {"name": "none"}}),
        ),
        objective(
            "inference",
            "older",
            json!({"priority": 1, "poolRef": {"group": "inference.networking.x-k8s.io", "name": "p"}}),
        ),
        objective(
            "inference",
            "service",
            json!({"priority": 1, "poolRef": {"kind": "Service", "name": "p"}}),
        ),
        objective("inference", "no-pool", json!({"priority": 1})),
        objective(
            "other",
            "gold",
            json!({"priority": 7, "poolRef": {"name": "p"}}),
        ),
    ]);
    let found: Vec<_> = objectives(&served_pools(), &all)
        .into_iter()
        .map(|o| (o.pool.to_string(), o.name, o.priority))
        .collect();
    let expected = [
        ("p", "batch", -1),
        ("p", "gold", 10),
        ("other/p", "gold", 7),
        ("q", "unset", 0),
    ];
    assert_eq!(
        found,
        expected.map(|(pool, name, priority)| (pool.to_owned(), name.to_owned(), priority))
    );
}

/// Returns a rule that rewrites `models` to `to`.
fn rule(models: &[&str], to: &[&str]) -> Value {
    let matches: Vec<Value> = models
        .iter()
        .map(|model| json!({"model": {"type": "Exact", "value": model}}))
        .collect();
    let targets: Vec<Value> = to
        .iter()
        .map(|model| json!({"modelRewrite": model}))
        .collect();
    json!({"matches": matches, "targets": targets})
}

#[test]
fn rules_are_ordered_by_object_age() {
    let spec = |pool: &str, rules: Value| json!({"poolRef": {"name": pool}, "rules": rules});
    let all = objects(&[
        object(
            "inference",
            "young",
            "2026-03-01T00:00:00Z",
            &spec("p", json!([rule(&["a"], &["young"])])),
        ),
        object(
            "inference",
            "b",
            "2026-02-01T00:00:00Z",
            &spec("q", json!([rule(&[], &["b"])])),
        ),
        object(
            "inference",
            "a",
            "2026-02-01T00:00:00Z",
            &spec(
                "p",
                json!([rule(&[], &["a"]), rule(&["a", "b"], &["x", "y"])]),
            ),
        ),
        object(
            "other",
            "old",
            "2026-01-01T00:00:00Z",
            &spec("p", json!([rule(&[], &["old"])])),
        ),
        object(
            "other",
            "foreign",
            "2025-01-01T00:00:00Z",
            &spec("q", json!([rule(&[], &["foreign"])])),
        ),
    ]);
    let found: Vec<String> = rewrites(&served_pools(), &all)
        .into_iter()
        .map(|rule| {
            format!(
                "{} {} {:?} {:?}",
                rule.pool,
                rule.object,
                rule.models,
                rule.to.first().map(|to| &to.0)
            )
        })
        .collect();
    let expected = [
        r#"other/p other/old [] Some("old")"#,
        r#"p inference/a [] Some("a")"#,
        r#"p inference/a ["a", "b"] Some("x")"#,
        r#"q inference/b [] Some("b")"#,
        r#"p inference/young ["a"] Some("young")"#,
    ];
    assert_eq!(found, expected);
}

#[test]
fn unknown_match_type_matches_nothing() {
    for (rule, models, to) in [
        (
            json!({"targets": [{"modelRewrite": "t", "weight": 3}]}),
            Some(vec![]),
            vec![("t", Some(3))],
        ),
        (
            json!({"matches": [{"model": {"value": "m"}}], "targets": [{"modelRewrite": "t"}]}),
            Some(vec!["m"]),
            vec![("t", None)],
        ),
        (
            json!({"matches": [{"model": {"type": "Regex", "value": "m"}}], "targets": [{"modelRewrite": "t"}]}),
            None,
            vec![],
        ),
        (
            json!({"matches": [{}], "targets": [{"modelRewrite": "t"}]}),
            None,
            vec![],
        ),
        (json!({"matches": [], "targets": []}), None, vec![]),
        (json!({"targets": [{"weight": 3}]}), None, vec![]),
        (
            json!({"targets": [{"modelRewrite": "t", "weight": -3}]}),
            Some(vec![]),
            vec![("t", Some(0))],
        ),
    ] {
        let read: RewriteRuleSpec = serde_json::from_value(rule.clone()).unwrap();
        let found = parse_rule(&read, &"p".into(), "o");
        let expected = models.map(|models| PoolRewrite {
            pool: "p".into(),
            object: "o".to_owned(),
            models: models.into_iter().map(str::to_owned).collect(),
            to: to
                .into_iter()
                .map(|(model, weight)| (model.to_owned(), weight))
                .collect(),
        });
        assert_eq!(found, expected, "{rule}");
    }
}
