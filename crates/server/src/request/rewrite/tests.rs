use super::*;

fn rewrites(text: &str) -> RewriteRules {
    let config: RewritesConfig = serde_json::from_str(text).unwrap();
    assert!(config.problems().is_empty(), "{:?}", config.problems());
    RewriteRules::from(&config)
}

/// Chooses a model without pools and without further rules.
fn choose<'a>(
    rules: &'a RewriteRules,
    name: Option<&'a str>,
    header: Option<&'a str>,
    random: f64,
) -> Option<&'a str> {
    static NONE: RewriteRules = RewriteRules { rules: Vec::new() };
    rules.choose_model(
        &NONE,
        RequestedModel {
            name,
            header,
            pool: None,
        },
        random,
    )
}

#[test]
fn model_rule_precedes_catch_all_rule() {
    let rules = rewrites(
        r#"{"rules": [
            {"targets": [{"model": "any"}]},
            {"models": ["a", "b"], "targets": [{"model": "first"}]},
            {"models": ["b", "c"], "targets": [{"model": "second"}]},
            {"models": ["d"], "targets": [{"model": "d"}]}
        ]}"#,
    );
    let cases = [
        (Some("a"), None, Some("first")),
        (Some("b"), None, Some("first")),
        (Some("c"), None, Some("second")),
        (Some("A"), None, Some("any")),
        (None, None, Some("any")),
        (Some("any"), None, None),
        (Some("d"), None, None),
        (Some("a"), Some("h"), Some("h")),
        (None, Some(" h "), Some("h")),
        (Some("a"), Some(" "), Some("first")),
        (Some("a"), Some("a"), None),
    ];
    for (requested, header, chosen) in cases {
        assert_eq!(
            choose(&rules, requested, header, 0.5),
            chosen,
            "{requested:?} {header:?}"
        );
    }
    let named = rewrites(r#"{"rules": [{"models": ["a"], "targets": [{"model": "b"}]}]}"#);
    assert_eq!(
        [
            choose(&named, None, None, 0.0),
            choose(&named, Some("b"), None, 0.0)
        ],
        [None, None]
    );
    assert_eq!(choose(&RewriteRules::default(), Some("a"), None, 0.0), None);
    assert!(RewriteRules::default().is_empty() && !named.is_empty());
}

#[test]
fn shares_follow_weights() {
    let cases: [(&str, &[(&str, usize)]); 4] = [
        (
            r#"[{"model": "a", "weight": 90}, {"model": "b", "weight": 10}]"#,
            &[("a", 900), ("b", 100)],
        ),
        (
            r#"[{"model": "a"}, {"model": "b"}, {"model": "c"}, {"model": "d"}]"#,
            &[("a", 250), ("b", 250), ("c", 250), ("d", 250)],
        ),
        (
            r#"[{"model": "a", "weight": 0}, {"model": "b", "weight": 1}, {"model": "c", "weight": 0}]"#,
            &[("b", 1000)],
        ),
        (
            r#"[{"model": "a", "weight": 4294967295}, {"model": "b", "weight": 4294967295}]"#,
            &[("a", 500), ("b", 500)],
        ),
    ];
    for (targets, shares) in cases {
        let rules = rewrites(&format!(r#"{{"rules": [{{"targets": {targets}}}]}}"#));
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for step in 0..1000 {
            let chosen = choose(&rules, None, None, f64::from(step) / 1000.0).unwrap();
            match counts.iter_mut().find(|(name, _)| *name == chosen) {
                Some((_, count)) => *count += 1,
                None => counts.push((chosen, 1)),
            }
        }
        assert_eq!(counts, shares, "{targets}");
        assert!(
            choose(&rules, None, None, 1.0).is_some(),
            "any random number selects a target"
        );
    }
}

#[test]
fn model_can_keep_share_of_its_requests() {
    let rules = rewrites(
        r#"{"rules": [{"models": ["a"], "targets": [{"model": "a", "weight": 3}, {"model": "b", "weight": 1}]}]}"#,
    );
    assert_eq!(choose(&rules, Some("a"), None, 0.74), None);
    assert_eq!(choose(&rules, Some("a"), None, 0.75), Some("b"));
}

#[test]
fn pool_rules_follow_configured_rules() {
    let rule = |text: &str| serde_json::from_str::<RewriteRule>(text).unwrap();
    let configured = rewrites(
        r#"{"rules": [{"targets": [{"model": "own"}]}, {"models": ["a"], "targets": [{"model": "own-a"}]}]}"#,
    );
    let pools = RewriteRules::from_pools([
        ("p".into(), rule(r#"{"targets": [{"model": "p"}]}"#)),
        (
            "p".into(),
            rule(r#"{"models": ["a", "b"], "targets": [{"model": "p-b"}]}"#),
        ),
        (
            "q".into(),
            rule(r#"{"models": ["b", "c"], "targets": [{"model": "q-c", "weight": 0}]}"#),
        ),
    ]);
    let chosen = |first: &RewriteRules, name: Option<&str>, pool: Option<&str>| {
        first
            .choose_model(
                &pools,
                RequestedModel {
                    name,
                    header: None,
                    pool,
                },
                0.5,
            )
            .map(str::to_owned)
    };
    let none = RewriteRules::default();
    for (name, pool, with, without) in [
        (Some("a"), None, "own-a", Some("p-b")),
        (Some("b"), None, "p-b", Some("p-b")),
        (Some("b"), Some("q"), "q-c", Some("q-c")),
        (Some("c"), Some("p"), "own", Some("p")),
        (Some("c"), Some("other"), "own", None),
        (None, Some("p"), "own", Some("p")),
    ] {
        assert_eq!(
            chosen(&configured, name, pool).as_deref(),
            Some(with),
            "{name:?} {pool:?}"
        );
        assert_eq!(
            chosen(&none, name, pool).as_deref(),
            without,
            "{name:?} {pool:?}"
        );
    }
}

/// The rules of a cluster may have such weights; a configuration rejects them.
#[test]
fn zero_weights_are_equal_shares() {
    let parse =
        |text: &str| RewriteRules::from_pools([("p".into(), serde_json::from_str(text).unwrap())]);
    let zero = parse(r#"{"targets": [{"model": "a", "weight": 0}, {"model": "b"}]}"#);
    assert_eq!(
        [0.4, 0.6].map(|random| choose(&zero, None, None, random)),
        [Some("a"), Some("b")]
    );
    let mixed = parse(r#"{"targets": [{"model": "a"}, {"model": "b", "weight": 1}]}"#);
    assert_eq!(
        [0.0, 0.9].map(|random| choose(&mixed, None, None, random)),
        [Some("b"), Some("b")]
    );
}
