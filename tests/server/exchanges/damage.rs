//! Tests of the comparison itself: it must detect every change of a transcript.

use serde_json::{Value, json};

use crate::exchanges::compare::differences;
use crate::exchanges::play::play;
use crate::exchanges::played_transcripts;
use crate::exchanges::script::{ExchangeScript, ScriptStep, StreamEnd};

/// Returns copies of a value with one change each.
fn changed_copies(value: &Value) -> Vec<Value> {
    let mut all = Vec::new();
    match value {
        Value::Object(fields) => {
            let mut more = fields.clone();
            more.insert("surplus".to_owned(), json!(1));
            all.push(more.into());
            for (key, inner) in fields {
                let mut less = fields.clone();
                less.remove(key);
                all.push(less.into());
                all.extend(changed_copies(inner).into_iter().map(|inner| {
                    let mut changed = fields.clone();
                    changed.insert(key.clone(), inner);
                    changed.into()
                }));
            }
        }
        Value::Array(items) => {
            all.push(
                items
                    .iter()
                    .cloned()
                    .chain([json!({ "surplus": 1 })])
                    .collect(),
            );
            for (at, inner) in items.iter().enumerate() {
                let mut less = items.clone();
                less.remove(at);
                all.push(less.into());
                all.extend(changed_copies(inner).into_iter().map(|inner| {
                    let mut changed = items.clone();
                    changed[at] = inner;
                    changed.into()
                }));
            }
        }
        // Two digits, so that hexadecimal digits stay in pairs.
        Value::String(text) => all.push(json!(format!("{text}00"))),
        Value::Number(number) => match number.as_u64() {
            Some(number) => all.push(json!(number + 1)),
            None => all.push(json!(number.as_f64().unwrap() + 1.0)),
        },
        Value::Bool(flag) => all.push(json!(!flag)),
        Value::Null => {}
    }
    all
}

/// Returns true if the step has an expected result that is changed in the test.
fn has_expected_result(step: &ScriptStep) -> bool {
    !matches!(
        step,
        ScriptStep::Busy { .. }
            | ScriptStep::Workers { .. }
            | ScriptStep::End { .. }
            | ScriptStep::Returned { .. }
    )
}

/// A transcript with more replies adds no new case to this test, but takes time to copy.
const MAX_REPLIES: usize = 50;

fn is_long(step: &ScriptStep) -> bool {
    matches!(step, ScriptStep::Send(send) if send.replies.len() > MAX_REPLIES)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_changed_value_is_detected() {
    let mut tried = 0;
    for (name, script, played) in played_transcripts().await {
        let Ok(played) = played else { continue };
        let steps = script.steps.iter().zip(&played.found);
        for (step, found) in steps.filter(|(step, _)| has_expected_result(step) && !is_long(step)) {
            for copy in changed_copies(&step.expected()) {
                tried += 1;
                assert!(
                    !differences(&copy, found).is_empty(),
                    "{name}: the change is not detected: {copy}"
                );
            }
        }
    }
    assert!(tried > 5_000, "only {tried} changes");
}

#[tokio::test]
async fn damaged_transcript_fails_in_playback() {
    let (name, script) = ExchangeScript::all()
        .into_iter()
        .find(|(_, script)| script.steps.len() > 2)
        .unwrap();
    assert_eq!(
        Box::pin(play(&script)).await.mismatches(&script),
        [""; 0],
        "{name}"
    );
    let mut fewer = script.clone();
    let replies = fewer.steps.iter_mut().find_map(|step| match step {
        ScriptStep::Send(send) if !send.replies.is_empty() => Some(&mut send.replies),
        _ => None,
    });
    replies.unwrap().pop();
    assert_ne!(
        Box::pin(play(&fewer)).await.mismatches(&fewer),
        [""; 0],
        "{name}: an additional reply is not detected"
    );
}

#[tokio::test]
async fn early_stream_end_is_detected() {
    let ended_by_warmroute = |step: &ScriptStep| {
        matches!(
            step,
            ScriptStep::End {
                end: StreamEnd::ByWarmroute,
                ..
            }
        )
    };
    let (name, mut script) = ExchangeScript::all()
        .into_iter()
        .find(|(_, script)| script.steps.iter().any(ended_by_warmroute))
        .unwrap();
    for step in &mut script.steps {
        if let ScriptStep::End {
            end: end @ StreamEnd::ByWarmroute,
            ..
        } = step
        {
            *end = StreamEnd::Close;
        }
    }
    let wrong = Box::pin(play(&script)).await.mismatches(&script);
    assert!(
        wrong
            .iter()
            .any(|what| what.contains("the server ended the stream early")),
        "{name}: {wrong:?}"
    );
}
