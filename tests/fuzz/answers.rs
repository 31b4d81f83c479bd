//! What is read from answers, and changed in them, as they pass.

use warmroute::openai::restore::Restorer;
use warmroute::openai::usage::{Kind, UsageScanner};

use crate::input::{Input, pieces};

/// Answers give the same numbers however they are cut, and where a model is renamed, go on the same.
pub(crate) fn answers(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let kind = if input.flag() {
        Kind::Whole
    } else {
        Kind::EventStream
    };
    let (seed, name) = (input.byte(), input.byte());
    let answer = input.rest();
    let whole = scanned(kind, std::iter::once(answer));
    assert_eq!(scanned(kind, pieces(answer, seed)), whole, "usage, cut");
    restored(answer, seed, name);
}

fn scanned<'a>(kind: Kind, pieces: impl Iterator<Item = &'a [u8]>) -> String {
    let mut scanner = UsageScanner::new(kind);
    pieces.for_each(|piece| scanner.push(piece));
    scanner.finish();
    let first = (
        scanner.usage(),
        scanner.content_events(),
        scanner.skipped(),
        scanner.is_done(),
    );
    // Some answers end twice.
    scanner.finish();
    assert_eq!(scanner.usage(), first.0, "usage, finished twice");
    format!("{first:?}")
}

fn restored(answer: &[u8], seed: u8, name: u8) {
    let served = ["served", "s\"\u{e9}\\", "", "m"][usize::from(name) % 4];
    let asked = ["asked", "a\u{1f600}\n\"", "", "served"][usize::from(name >> 2) % 4];
    let run = |served: &str, asked: &str, pieces: &mut dyn Iterator<Item = &[u8]>| {
        let mut restorer = Restorer::new(served, asked);
        let mut out = Vec::new();
        for piece in pieces {
            out.extend_from_slice(&restorer.push(piece));
        }
        out.extend(restorer.finish());
        out
    };
    let whole = run(served, asked, &mut std::iter::once(answer));
    assert_eq!(
        run(served, asked, &mut pieces(answer, seed)),
        whole,
        "a model restored, cut"
    );
    let nobody = "a name that no answer has";
    assert_eq!(
        run(nobody, asked, &mut pieces(answer, seed)),
        answer,
        "another model's answer"
    );
    let Ok(serde_json::Value::Object(before)) = serde_json::from_slice(answer) else {
        return;
    };
    let after: serde_json::Value = serde_json::from_slice(&whole).expect("a document stays one");
    for (key, value) in before {
        let may_change = ["model", "response", "message"].contains(&&*key);
        assert!(may_change || after[&key] == value, "`{key}` has changed");
    }
}
