//! The comparison itself: whatever is changed in a transcript, it is noticed.

use serde_json::{Value, json};

use crate::compare::differences;
use crate::games;
use crate::play::play;
use crate::script::{End, Script, Step};

/// Every way to damage one place of what is expected.
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
        // Two more, so that hexadecimal digits stay in pairs.
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

/// The steps that expect something.
fn telling(step: &Step) -> bool {
    !matches!(
        step,
        Step::Busy { .. } | Step::Workers { .. } | Step::End { .. } | Step::Returned { .. }
    )
}

/// Beyond it a transcript has nothing new for this test, and much to copy.
const MOST_REPLIES: usize = 50;

fn is_long(step: &Step) -> bool {
    matches!(step, Step::Send(send) if send.replies.len() > MOST_REPLIES)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_any_place_of_any_transcript_is_noticed() {
    let mut tried = 0;
    for (name, script, played) in games().await {
        let Ok(played) = played else { continue };
        let steps = script.steps.iter().zip(&played.found);
        for (step, found) in steps.filter(|(step, _)| telling(step) && !is_long(step)) {
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
async fn a_damaged_transcript_fails_when_it_is_played() {
    let (name, script) = Script::all()
        .into_iter()
        .find(|(_, script)| script.steps.len() > 2)
        .unwrap();
    assert_eq!(play(&script).await.wrong(&script), [""; 0], "{name}");
    let mut fewer = script.clone();
    let replies = fewer.steps.iter_mut().find_map(|step| match step {
        Step::Send(send) if !send.replies.is_empty() => Some(&mut send.replies),
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
async fn a_stream_that_we_end_too_early_is_noticed() {
    let ended_by_us = |step: &Step| matches!(step, Step::End { end: End::ByUs, .. });
    let (name, mut script) = Script::all()
        .into_iter()
        .find(|(_, script)| script.steps.iter().any(ended_by_us))
        .unwrap();
    for step in &mut script.steps {
        if let Step::End {
            end: end @ End::ByUs,
            ..
        } = step
        {
            *end = End::Close;
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
