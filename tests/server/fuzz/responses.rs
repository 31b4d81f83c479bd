//! Parsing and rewriting of responses.

use warmroute_tokens::openai::restore::ModelNameRestorer;
use warmroute_tokens::openai::usage::{ResponseEncoding, UsageScanner};

use super::input::{Input, pieces};

/// Checks that usage and rewritten model name do not depend on the chunks of a response.
pub(crate) fn responses(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let kind = if input.flag() {
        ResponseEncoding::Document
    } else {
        ResponseEncoding::EventStream
    };
    let seed = input.byte();
    let name = input.byte();
    let answer = input.rest();
    let whole = scan(kind, std::iter::once(answer));
    assert_eq!(
        scan(kind, pieces(answer, seed)),
        whole,
        "usage depends on the chunks"
    );
    check_restored(answer, seed, name);
}

fn scan<'a>(kind: ResponseEncoding, pieces: impl Iterator<Item = &'a [u8]>) -> String {
    let mut scanner = UsageScanner::new(kind);
    pieces.for_each(|piece| scanner.push(piece));
    scanner.finish();
    let first = (
        scanner.usage(),
        scanner.content_events(),
        scanner.is_complete(),
    );
    // A response may end more than once.
    scanner.finish();
    assert_eq!(scanner.usage(), first.0, "usage changes after the end");
    format!("{first:?}")
}

fn check_restored(answer: &[u8], seed: u8, name: u8) {
    let served = ["served", "s\"\u{e9}\\", "", "m"][usize::from(name) % 4];
    let requested = ["asked", "a\u{1f600}\n\"", "", "served"][usize::from(name >> 2) % 4];
    let run = |served: &str, requested: &str, pieces: &mut dyn Iterator<Item = &[u8]>| {
        let mut restorer = ModelNameRestorer::new(served, requested);
        let mut out = Vec::new();
        for piece in pieces {
            out.extend_from_slice(&restorer.push(piece));
        }
        out.extend(restorer.finish());
        out
    };
    let whole = run(served, requested, &mut std::iter::once(answer));
    assert_eq!(
        run(served, requested, &mut pieces(answer, seed)),
        whole,
        "the restored model name depends on the chunks"
    );
    let other = "a name that no answer has";
    assert_eq!(
        run(other, requested, &mut pieces(answer, seed)),
        answer,
        "a response of another model must not change"
    );
    let Ok(serde_json::Value::Object(before)) = serde_json::from_slice(answer) else {
        return;
    };
    let after: serde_json::Value =
        serde_json::from_slice(&whole).expect("the document stays valid");
    for (key, value) in before {
        let may_change = ["model", "response", "message"].contains(&&*key);
        assert!(may_change || after[&key] == value, "`{key}` has changed");
    }
}
