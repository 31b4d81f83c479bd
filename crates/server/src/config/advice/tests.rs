use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::config::WorkerSource;

fn advice(model: &Value, workers: &[Value], extra: &Value) -> Vec<String> {
    let numbered = workers.iter().zip(1..).map(|(worker, id)| {
        let mut worker = worker.clone();
        worker["id"] = json!(id);
        worker["endpoint"] = json!(format!("10.0.0.{id}:8000"));
        worker
    });
    let mut config =
        json!({"models": [{"name": "m"}], "workers": {"list": numbered.collect::<Vec<_>>()}});
    config["models"][0]
        .as_object_mut()
        .unwrap()
        .extend(model.as_object().unwrap().clone());
    config
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    let config = Config::parse(Path::new("/c.yaml"), config.to_string().as_bytes()).unwrap();
    let WorkerSource::Fixed(workers) = config.worker_source() else {
        panic!("the workers are not a fixed list")
    };
    config
        .advice(&workers)
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
fn phases_without_workers_cause_warnings() {
    let [p, d, a] = ["prefill", "decode", "aggregated"].map(with_role);
    let call = || prefill_mode("call");
    assert_warnings(&[
        (json!({}), vec![a.clone()], &[]),
        (
            json!({}),
            vec![p.clone(), d.clone()],
            &["only named in headers"],
        ),
        (json!({}), vec![d.clone(), a.clone()], &[]),
        (prefill_mode("header"), vec![p.clone(), d.clone()], &[]),
        (call(), vec![p.clone(), d.clone()], &[]),
        (call(), vec![p.clone(), a.clone()], &[]),
        (
            call(),
            vec![d.clone()],
            &["decode workers compute every prompt"],
        ),
        (
            call(),
            vec![a.clone(), a.clone()],
            &["decode workers compute every prompt"],
        ),
        (call(), vec![p.clone()], &["none can generate responses"]),
    ]);
}

#[test]
fn mirrored_prefill_without_partner_causes_warning() {
    let [p, d, a] = ["prefill", "decode", "aggregated"].map(with_role);
    let mirror = || prefill_mode("mirror");
    assert_warnings(&[
        (mirror(), vec![p.clone(), d.clone()], &[]),
        (
            mirror(),
            vec![d.clone(), a.clone()],
            &["its requests are rejected"],
        ),
        (
            mirror(),
            vec![p.clone(), a.clone()],
            &["have no bootstrap partner"],
        ),
        (mirror(), vec![a.clone()], &["have no roles"]),
        (
            mirror(),
            vec![
                json!({"role": "prefill", "bootstrap": {"port": 9000}}),
                json!({"role": "decode", "bootstrap": {}}),
            ],
            &["worker 2: `bootstrap` has no effect: it has `role: decode`"],
        ),
        (
            prefill_mode("call"),
            vec![json!({"role": "prefill", "bootstrap": {}}), d.clone()],
            &["worker 1: `bootstrap` has no effect: the model m has no `prefill: {mode: mirror}`"],
        ),
        (
            json!({}),
            vec![json!({"bootstrap": {}})],
            &["`role: aggregated`"],
        ),
    ]);
}

#[test]
fn front_end_without_pins_causes_warning() {
    let shared = || vec![json!({"via": "front_end"})];
    let profiles = |names: &[&str]| json!({"gateway": {"header_profiles": names}});
    assert_eq!(advice(&json!({}), &shared(), &json!({})), [""; 0]);
    let unnamed = advice(&json!({}), &shared(), &profiles(&["gateway-api"]));
    assert!(
        unnamed.len() == 1 && unnamed[0].contains("add `worker-id` or `dynamo`"),
        "{unnamed:?}"
    );
    let by_pair = json!({"via": "front_end", "role": "prefill"});
    let decode = json!({"via": "front_end", "role": "decode"});
    let called = advice(
        &prefill_mode("call"),
        &[by_pair, decode],
        &profiles(&["worker-id"]),
    );
    assert!(
        called.len() == 2 && called[0].contains("set `prefill: {mode: header}`"),
        "{called:?}"
    );
}

fn with_role(role: &str) -> Value {
    json!({"role": role})
}

fn prefill_mode(mode: &str) -> Value {
    json!({"prefill": {"mode": mode}})
}

/// Asserts that each model with these workers causes exactly the expected warnings.
fn assert_warnings(cases: &[(Value, Vec<Value>, &[&str])]) {
    for (model, workers, expected) in cases {
        let warnings = advice(model, workers, &json!({}));
        assert_eq!(
            warnings.len(),
            expected.len(),
            "{model} {workers:?}: {warnings:?}"
        );
        for (warning, text) in warnings.iter().zip(*expected) {
            assert!(warning.contains(text), "{warning}");
        }
    }
}

#[test]
fn empty_pools_and_duplicate_selectors_cause_warnings() {
    let pool_routes = json!({"routing": {"pool_routes": {"rules": [{"pool": "p"}, {"pool": "q", "paths": ["/q"]}]}}});
    let worker = json!({"taints": ["pool=p"]});
    let warnings = advice(&json!({}), std::slice::from_ref(&worker), &pool_routes);
    assert!(
        warnings.len() == 1 && warnings[0].contains("`q`") && warnings[0].contains("`pool=q`"),
        "{warnings:?}"
    );
    assert_eq!(
        advice(
            &json!({}),
            &[worker, json!({"taints": ["pool=q"]})],
            &pool_routes
        ),
        Vec::<String>::new()
    );
    let pool_routes = json!({"routing": {"pool_routes": {"authorities": {"warmroute.a": "p", "warmroute.b": "q"}}}});
    let warnings = advice(&json!({}), &[json!({"taints": ["pool=p"]})], &pool_routes);
    assert!(
        warnings.len() == 1 && warnings[0].contains("`q`"),
        "{warnings:?}"
    );
    let pool_routes = json!({"routing": {"pool_routes": {"rules": [{"pool": "p"}, {"pool": "q", "paths": ["/q"]}]}}});
    let pools = |pools: Value| -> Vec<String> {
        let mut config =
            json!({"models": [{"name": "m"}], "workers": {"kubernetes": {"pools": pools}}});
        config
            .as_object_mut()
            .unwrap()
            .extend(pool_routes.as_object().unwrap().clone());
        let config = Config::parse(Path::new("/c.yaml"), config.to_string().as_bytes()).unwrap();
        config
            .advice(&config.typical_workers())
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    let two = json!([{"name": "p"}, {"name": "q"}, {"name": "p", "namespace": "n"}]);
    assert_eq!(pools(two), Vec::<String>::new());
    let warnings = pools(
        json!([{"name": "p", "namespace": "n"}, {"name": "q"}, {"name": "p", "namespace": "n"}]),
    );
    assert!(
        warnings.len() == 2
            && warnings[0].contains("are `n/p`, `q`, `n/p`")
            && warnings[1].contains("already selects"),
        "{warnings:?}"
    );
    let same = |ports: [u16; 2]| {
        let of = |port: u16| json!({"selector": {"app": "p"}, "ports": [port]});
        let warnings = pools(json!([{"name": "p"}, {"name": "q"}, of(ports[0]), of(ports[1])]));
        warnings.len()
    };
    assert_eq!([same([1, 2]), same([1, 1])], [0, 1]);
}

#[test]
fn several_pools_without_routes_cause_a_warning() {
    let workers = [json!({"taints": ["pool=p"]}), json!({"taints": ["pool=q"]})];
    let warnings = advice(&json!({}), &workers, &json!({}));
    assert!(
        warnings.len() == 1 && warnings[0].contains("`p`, `q`"),
        "{warnings:?}"
    );
    assert_eq!(
        advice(&json!({}), &workers[..1], &json!({})),
        Vec::<String>::new()
    );
    for pool_routes in [
        json!({"header": "x-pool"}),
        json!({"rules": [{"pool": "p"}]}),
        json!({"rules": [{"pool": "p", "paths": ["/p"]}], "authorities": {"warmroute.b": "q"}}),
        json!({"authorities": {"warmroute.a": "p", "warmroute.b": "q"}}),
    ] {
        assert_eq!(
            advice(
                &json!({}),
                &workers,
                &json!({"routing": {"pool_routes": pool_routes}})
            ),
            Vec::<String>::new(),
            "{pool_routes}"
        );
    }
    for pool_routes in [
        json!({"rules": [{"pool": "p", "paths": ["/p"]}]}),
        json!({"authorities": {"warmroute.a": "p"}}),
    ] {
        let warnings = advice(
            &json!({}),
            &workers,
            &json!({"routing": {"pool_routes": pool_routes}}),
        );
        assert!(
            warnings.len() == 1 && warnings[0].contains("does not name the pools `q`"),
            "{warnings:?}"
        );
    }
}

#[test]
fn suspicious_values_cause_warnings() {
    let open = json!({"address": "0.0.0.0:9002", "unprotected": true});
    let cases = [
        (json!({}), None),
        (
            json!({"requests": {"limits": {"max_body_size": "32B"}}}),
            Some("requests.limits.max_body_size: 32 bytes"),
        ),
        (
            json!({"requests": {"limits": {"max_body_size": "64KiB"}}}),
            None,
        ),
        (
            json!({"requests": {"limits": {"decision_timeout": "999ms"}}}),
            None,
        ),
        (
            json!({"requests": {"limits": {"decision_timeout": "5s"}}}),
            Some("requests.limits.decision_timeout: 5s is not less"),
        ),
        (json!({"requests": {"clients": {"trusted": true}}}), None),
        (json!({"listeners": {"ext_proc": open}}), None),
        (
            json!({"listeners": {"ext_proc": open}, "requests": {"clients": {"trusted": true}}}),
            Some("requests.clients.trusted: any client that reaches 0.0.0.0:9002"),
        ),
    ];
    for (extra, expected) in cases {
        let found = advice(&json!({}), &[json!({})], &extra);
        assert_eq!(
            found.len(),
            usize::from(expected.is_some()),
            "{extra}: {found:?}"
        );
        assert!(
            expected.is_none_or(|text| found[0].starts_with(text)),
            "{found:?}"
        );
    }
}

#[test]
fn ignored_conditions_cause_warnings() {
    let extra = json!({"routing": {"disaggregation": {"conditional": {}}}});
    let pools = [json!({"role": "prefill"}), json!({"role": "decode"})];
    assert_eq!(
        advice(&json!({"prefill": {"mode": "call"}}), &pools, &extra),
        Vec::<String>::new()
    );
    let warnings = advice(&json!({"prefill": {"mode": "mirror"}}), &pools, &extra);
    assert!(
        warnings.len() == 1
            && warnings[0]
                .contains("`routing.disaggregation.conditional` does not apply to models"),
        "{warnings:?}"
    );
}
