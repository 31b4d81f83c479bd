//! Tests of the comparison itself: it detects every change of a transcript.

use serde_json::{Value, json};

use crate::exchanges::compare::differences;
use crate::exchanges::games;
use crate::exchanges::play::play;
use crate::exchanges::script::{ExchangeScript, ScriptStep, StreamEnd};

/// Every value with one damaged place.
fn damaged(value: &Value) -> Vec<Value> {
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
                all.extend(damaged(inner).into_iter().map(|inner| {
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
                all.extend(damaged(inner).into_iter().map(|inner| {
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

/// Whether the step expects anything.
fn is_reported(step: &ScriptStep) -> bool {
    !matches!(
        step,
        ScriptStep::Busy { .. }
            | ScriptStep::Workers { .. }
            | ScriptStep::End { .. }
            | ScriptStep::Returned { .. }
    )
}

/// A longer transcript adds no new case to this test, and much copying.
const MOST_REPLIES: usize = 50;

fn is_long(step: &ScriptStep) -> bool {
    matches!(step, ScriptStep::Send(send) if send.replies.len() > MOST_REPLIES)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_changed_value_is_detected() {
    let mut tried = 0;
    for (name, script, played) in games().await {
        let Ok(played) = played else { continue };
        let steps = script.steps.iter().zip(&played.found);
        for (step, found) in steps.filter(|(step, _)| is_reported(step) && !is_long(step)) {
            for damaged in damaged(&step.expected()) {
                tried += 1;
                assert!(
                    !differences(&damaged, found).is_empty(),
                    "{name}: nobody notices {damaged}"
                );
            }
        }
    }
    assert!(tried > 5_000, "only {tried} places");
}

#[tokio::test]
async fn damaged_transcript_fails_in_playback() {
    let (name, script) = ExchangeScript::all()
        .into_iter()
        .find(|(_, script)| script.steps.len() > 2)
        .unwrap();
    assert_eq!(play(&script).await.wrong(&script), [""; 0], "{name}");
    let mut fewer = script.clone();
    let replies = fewer.steps.iter_mut().find_map(|step| match step {
        ScriptStep::Send(send) if !send.replies.is_empty() => Some(&mut send.replies),
        _ => None,
    });
    replies.unwrap().pop();
    assert_ne!(
        play(&fewer).await.wrong(&fewer),
        [""; 0],
        "{name}: an answer too many"
    );
}

#[tokio::test]
async fn early_stream_end_is_detected() {
    let ended_by_us = |step: &ScriptStep| {
        matches!(
            step,
            ScriptStep::End {
                end: StreamEnd::ByUs,
                ..
            }
        )
    };
    let (name, mut script) = ExchangeScript::all()
        .into_iter()
        .find(|(_, script)| script.steps.iter().any(ended_by_us))
        .unwrap();
    for step in &mut script.steps {
        if let ScriptStep::End {
            end: end @ StreamEnd::ByUs,
            ..
        } = step
        {
            *end = StreamEnd::Close;
        }
    }
    let wrong = play(&script).await.wrong(&script);
    assert!(
        wrong
            .iter()
            .any(|what| what.contains("ended the stream already")),
        "{name}: {wrong:?}"
    );
}
