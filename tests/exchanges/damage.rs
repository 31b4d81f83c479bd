//! The comparison itself: whatever is changed in a transcript, it is noticed.

use serde_json::{Value, json};

use crate::compare::differences;
use crate::play::play;
use crate::script::{Script, Step};

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
            all.push(items.iter().cloned().chain([json!({ "surplus": 1 })]).collect());
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
    !matches!(step, Step::Busy { .. } | Step::Workers { .. } | Step::End { .. } | Step::Returned { .. })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_any_place_of_a_transcript_is_noticed() {
    let mut tried = 0;
    for (name, script) in Script::all().into_iter().step_by(4) {
        let played = play(&script).await;
        for (step, found) in script.steps.iter().zip(&played.found).filter(|(step, _)| telling(step)) {
            for damaged in damaged(&step.expected()) {
                tried += 1;
                assert!(!differences(&damaged, found).is_empty(), "{name}: nobody notices {damaged}");
            }
        }
    }
    assert!(tried > 200, "only {tried} places");
}

#[tokio::test]
async fn a_damaged_transcript_fails_when_it_is_played() {
    let (name, script) = Script::all().into_iter().find(|(_, script)| script.steps.len() > 2).unwrap();
    assert_eq!(play(&script).await.wrong(&script), [""; 0], "{name}");
    let mut fewer = script.clone();
    let replies = fewer.steps.iter_mut().find_map(|step| match step {
        Step::Send(send) if !send.replies.is_empty() => Some(&mut send.replies),
        _ => None,
    });
    replies.unwrap().pop();
    assert_ne!(play(&fewer).await.wrong(&fewer), [""; 0], "{name}: an answer too many");
}
