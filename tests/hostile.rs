//! What bodies cost that are made to cost memory. One process with one test, because memory is measured for all of it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;

use warmroute::openai::usage::{Kind, UsageScanner};
use warmroute::openai::{Api, Prompt, parse};

const MIB: usize = 1 << 20;

/// The most memory this process has had since the last time it was asked.
fn peak(of: impl FnOnce()) -> usize {
    // Linux forgets the peak up to now when it is told to.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS:");
    of();
    status("VmHWM:").saturating_sub(before)
}

fn status(line: &str) -> usize {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let kib = text
        .lines()
        .find_map(|found| found.strip_prefix(line)?.trim().strip_suffix(" kB"))
        .unwrap();
    kib.trim().parse::<usize>().unwrap() << 10
}

/// The same with as many pieces as are looked at, by what one of them counts.
fn most(before: &str, piece: &str, after: &str) -> Vec<u8> {
    let values = piece.matches(['{', '[', ',']).count() + 1;
    let pieces = vec![piece; ((1 << 17) - 64) / values].join(",");
    format!("{before}{pieces}{after}{}", " ".repeat(1 << 18)).into_bytes()
}

/// `before`, so many times `piece` that it is a body of 32 MiB, and `after`.
fn body(before: &str, piece: &str, after: &str) -> Vec<u8> {
    let pieces = vec![piece; (32 * MIB) / (piece.len() + 1)].join(",");
    format!("{before}{pieces}{after}").into_bytes()
}

#[test]
fn no_body_and_no_answer_costs_many_times_its_bytes() {
    let message = r#"{"model":"m","messages":[{"role":"user","content":"#;
    let cases = [
        (
            "messages",
            Api::ChatCompletions,
            body(r#"{"model":"m","messages":["#, r#"{"role":""}"#, "]}"),
        ),
        (
            "broken messages",
            Api::ChatCompletions,
            body(r#"{"model":"m","messages":["#, "{}", "]}"),
        ),
        (
            "parts",
            Api::ChatCompletions,
            body(&format!("{message}["), "{}", "]}]}"),
        ),
        (
            "bare parts",
            Api::ChatCompletions,
            body(&format!("{message}["), r#""""#, "]}]}"),
        ),
        (
            "tools",
            Api::ChatCompletions,
            body(&format!("{message}\"x\"}}],\"tools\":["), "0", "]}"),
        ),
        (
            "lists",
            Api::ChatCompletions,
            body(&format!("{message}\"x\"}}],\"documents\":["), "[]", "]}"),
        ),
        (
            "items",
            Api::Responses,
            body(r#"{"model":"m","input":["#, "{}", "]}"),
        ),
        (
            "turns",
            Api::Messages,
            body(
                r#"{"model":"m","messages":["#,
                r#"{"role":"user","content":""}"#,
                "]}",
            ),
        ),
        (
            "blocks",
            Api::Messages,
            body(&format!("{message}["), r#"{"type":"text"}"#, "]}]}"),
        ),
        (
            "pooled messages",
            Api::Pooling,
            body(r#"{"model":"m","messages":["#, r#"{"role":""}"#, "]}"),
        ),
        (
            "an adapter",
            Api::SglangGenerate,
            body(r#"{"text":"x","lora_path":["#, "0", "]}"),
        ),
        (
            "prompts",
            Api::Completions,
            body(r#"{"model":"m","prompt":["#, r#""""#, "]}"),
        ),
        (
            "prompts of tokens",
            Api::VllmGenerate,
            body(r#"{"model":"m","token_ids":["#, "[]", "]}"),
        ),
        (
            "documents",
            Api::Rerank,
            body(r#"{"model":"m","documents":["#, r#""""#, "]}"),
        ),
    ];
    for (name, api, body) in cases {
        let mut kind = String::new();
        let took = peak(|| {
            kind = match parse(api, &body) {
                Ok(request) if request.prompt == Prompt::TooMany => "too many".to_owned(),
                Ok(_) => "read".to_owned(),
                Err(error) => error.to_string(),
            }
        });
        println!("{name}: {} MiB ({kind})", took / MIB);
        assert!(
            took < 2 * body.len(),
            "{name}: {} MiB for {} MiB",
            took / MIB,
            body.len() / MIB
        );
    }
    let kept = [
        (
            "messages",
            Api::ChatCompletions,
            most(r#"{"model":"m","messages":["#, r#"{"role":""}"#, "]}"),
        ),
        (
            "parts",
            Api::ChatCompletions,
            most(&format!("{message}["), "{}", "]}]}"),
        ),
        (
            "bare parts",
            Api::ChatCompletions,
            most(&format!("{message}["), r#""""#, "]}]}"),
        ),
        (
            "tools",
            Api::ChatCompletions,
            most(&format!("{message}\"x\"}}],\"tools\":["), "0", "]}"),
        ),
        (
            "lists",
            Api::ChatCompletions,
            most(&format!("{message}\"x\"}}],\"documents\":["), "[]", "]}"),
        ),
        (
            "objects",
            Api::ChatCompletions,
            most(
                &format!("{message}\"x\"}}],\"documents\":["),
                r#"{"":0}"#,
                "]}",
            ),
        ),
        (
            "turns",
            Api::Messages,
            most(
                r#"{"model":"m","messages":["#,
                r#"{"role":"user","content":""}"#,
                "]}",
            ),
        ),
    ];
    for (name, api, body) in kept {
        let took =
            peak(|| assert_ne!(parse(api, &body).unwrap().prompt, Prompt::TooMany, "{name}"));
        println!(
            "{name} that are looked at: {} MiB for {} KiB",
            took / MIB,
            body.len() >> 10
        );
        assert!(took < 96 * MIB, "{name}: {} MiB", took / MIB);
    }
    let honest = body(r#"{"model":"m","prompt":["#, "12345", "]}");
    let took = peak(|| {
        assert!(matches!(
            parse(Api::Completions, &honest).unwrap().prompt,
            Prompt::Tokens(_)
        ))
    });
    assert!(took < 3 * honest.len(), "tokens: {} MiB", took / MIB);

    for kind in [Kind::EventStream, Kind::Whole] {
        for piece in [
            "data: {\"choices\":[{}],\"usage\":null",
            "[",
            "{\"usage\":{",
            "\n\ndata:x\n",
            "\"\\\"",
        ] {
            let chunk = piece.repeat(MIB / piece.len());
            let took = peak(|| {
                let mut scanner = UsageScanner::new(kind);
                (0..48).for_each(|_| scanner.push(chunk.as_bytes()));
                scanner.finish();
            });
            assert!(took < 16 * MIB, "{kind:?} of {piece:?}: {} MiB", took / MIB);
        }
    }
}
