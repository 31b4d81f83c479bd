use super::*;

fn rewrites(text: &str) -> Rewrites {
    let config: RewritesConfig = serde_json::from_str(text).unwrap();
    assert!(config.problems().is_empty(), "{:?}", config.problems());
    Rewrites::from(&config)
}

#[test]
fn a_rule_for_the_model_beats_one_for_all_and_then_the_first() {
    let rules = rewrites(
        r#"{"rules": [
            {"to": [{"model": "any"}]},
            {"models": ["a", "b"], "to": [{"model": "first"}]},
            {"models": ["b", "c"], "to": [{"model": "second"}]},
            {"models": ["d"], "to": [{"model": "d"}]}
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
    for (asked, header, chosen) in cases {
        assert_eq!(rules.choose(asked, header, 0.5), chosen, "{asked:?} {header:?}");
    }
    let named = rewrites(r#"{"rules": [{"models": ["a"], "to": [{"model": "b"}]}]}"#);
    assert_eq!([named.choose(None, None, 0.0), named.choose(Some("b"), None, 0.0)], [None, None]);
    assert_eq!(Rewrites::default().choose(Some("a"), None, 0.0), None);
    assert!(Rewrites::default().is_empty() && !named.is_empty());
}

#[test]
fn shares_are_as_the_weights_say() {
    let cases: [(&str, &[(&str, usize)]); 4] = [
        (r#"[{"model": "a", "weight": 90}, {"model": "b", "weight": 10}]"#, &[("a", 900), ("b", 100)]),
        (
            r#"[{"model": "a"}, {"model": "b"}, {"model": "c"}, {"model": "d"}]"#,
            &[("a", 250), ("b", 250), ("c", 250), ("d", 250)],
        ),
        (r#"[{"model": "a", "weight": 0}, {"model": "b", "weight": 1}, {"model": "c", "weight": 0}]"#, &[("b", 1000)]),
        (r#"[{"model": "a", "weight": 4294967295}, {"model": "b", "weight": 4294967295}]"#, &[("a", 500), ("b", 500)]),
    ];
    for (targets, shares) in cases {
        let rules = rewrites(&format!(r#"{{"rules": [{{"to": {targets}}}]}}"#));
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for step in 0..1000 {
            let chosen = rules.choose(None, None, f64::from(step) / 1000.0).unwrap();
            match counts.iter_mut().find(|(name, _)| *name == chosen) {
                Some((_, count)) => *count += 1,
                None => counts.push((chosen, 1)),
            }
        }
        assert_eq!(counts, shares, "{targets}");
        assert!(rules.choose(None, None, 1.0).is_some(), "whatever the dice say");
    }
}

#[test]
fn a_model_that_is_also_sent_to_itself_keeps_its_share() {
    let rules =
        rewrites(r#"{"rules": [{"models": ["a"], "to": [{"model": "a", "weight": 3}, {"model": "b", "weight": 1}]}]}"#);
    assert_eq!(rules.choose(Some("a"), None, 0.74), None);
    assert_eq!(rules.choose(Some("a"), None, 0.75), Some("b"));
}
