//! Memory use of hostile bodies. The process runs a single test, because memory is measured per
//! process.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;

use warmroute_tokens::openai::usage::{ResponseEncoding, UsageScanner};
use warmroute_tokens::openai::{ApiKind, PromptInput, parse};

const MIB: usize = 1 << 20;

/// Returns the increase of the peak memory of this process while `run` executes.
fn peak(run: impl FnOnce()) -> usize {
    // Linux resets the peak memory counter.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS:");
    run();
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

/// Builds a body with as many pieces as are parsed at most.
fn largest_parsed(before: &str, piece: &str, after: &str) -> Vec<u8> {
    let values = piece.matches(['{', '[', ',']).count() + 1;
    let pieces = vec![piece; ((1 << 17) - 64) / values].join(",");
    format!("{before}{pieces}{after}{}", " ".repeat(1 << 18)).into_bytes()
}

/// Builds a body of 32 MiB: `before`, repetitions of `piece`, and `after`.
fn body(before: &str, piece: &str, after: &str) -> Vec<u8> {
    let pieces = vec![piece; 32 * MIB / (piece.len() + 1)].join(",");
    format!("{before}{pieces}{after}").into_bytes()
}

/// Start of a chat request, up to the content of its message.
const MESSAGE: &str = r#"{"model":"m","messages":[{"role":"user","content":"#;

/// Name, API and body of a request.
type HostileBody = (&'static str, ApiKind, Vec<u8>);

/// Returns chat requests with many small parts.
fn chat_bodies() -> Vec<HostileBody> {
    vec![
        (
            "messages",
            ApiKind::ChatCompletions,
            body(r#"{"model":"m","messages":["#, r#"{"role":""}"#, "]}"),
        ),
        (
            "broken messages",
            ApiKind::ChatCompletions,
            body(r#"{"model":"m","messages":["#, "{}", "]}"),
        ),
        (
            "parts",
            ApiKind::ChatCompletions,
            body(&format!("{MESSAGE}["), "{}", "]}]}"),
        ),
        (
            "bare parts",
            ApiKind::ChatCompletions,
            body(&format!("{MESSAGE}["), r#""""#, "]}]}"),
        ),
        (
            "tools",
            ApiKind::ChatCompletions,
            body(&format!("{MESSAGE}\"x\"}}],\"tools\":["), "0", "]}"),
        ),
        (
            "lists",
            ApiKind::ChatCompletions,
            body(&format!("{MESSAGE}\"x\"}}],\"documents\":["), "[]", "]}"),
        ),
    ]
}

/// Returns requests of the other APIs with many small parts.
fn other_bodies() -> Vec<HostileBody> {
    vec![
        (
            "items",
            ApiKind::Responses,
            body(r#"{"model":"m","input":["#, "{}", "]}"),
        ),
        (
            "turns",
            ApiKind::Messages,
            body(
                r#"{"model":"m","messages":["#,
                r#"{"role":"user","content":""}"#,
                "]}",
            ),
        ),
        (
            "blocks",
            ApiKind::Messages,
            body(&format!("{MESSAGE}["), r#"{"type":"text"}"#, "]}]}"),
        ),
        (
            "pooled messages",
            ApiKind::Pooling,
            body(r#"{"model":"m","messages":["#, r#"{"role":""}"#, "]}"),
        ),
        (
            "an adapter",
            ApiKind::SglangGenerate,
            body(r#"{"text":"x","lora_path":["#, "0", "]}"),
        ),
        (
            "prompts",
            ApiKind::Completions,
            body(r#"{"model":"m","prompt":["#, r#""""#, "]}"),
        ),
        (
            "prompts of tokens",
            ApiKind::VllmGenerate,
            body(r#"{"model":"m","token_ids":["#, "[]", "]}"),
        ),
        (
            "documents",
            ApiKind::Rerank,
            body(r#"{"model":"m","documents":["#, r#""""#, "]}"),
        ),
    ]
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn memory_use_stays_proportional_to_bodies() {
    bodies_use_proportional_memory();
    parsed_requests_use_little_memory();
    response_scanners_use_little_memory();
}

#[expect(clippy::print_stdout, reason = "figures of a test")]
fn bodies_use_proportional_memory() {
    for (name, api, body) in chat_bodies().into_iter().chain(other_bodies()) {
        let mut kind = String::new();
        let took = peak(|| {
            kind = match parse(api, &body) {
                Ok(request) if request.prompt == PromptInput::OverLimit => "too many".to_owned(),
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
    let token_prompt = body(r#"{"model":"m","prompt":["#, "12345", "]}");
    let took = peak(|| {
        assert!(matches!(
            parse(ApiKind::Completions, &token_prompt).unwrap().prompt,
            PromptInput::Tokens(_)
        ))
    });
    assert!(took < 3 * token_prompt.len(), "tokens: {} MiB", took / MIB);
}

/// Returns requests with as many parts as are parsed at most.
fn largest_parsed_bodies() -> Vec<HostileBody> {
    vec![
        (
            "messages",
            ApiKind::ChatCompletions,
            largest_parsed(r#"{"model":"m","messages":["#, r#"{"role":""}"#, "]}"),
        ),
        (
            "parts",
            ApiKind::ChatCompletions,
            largest_parsed(&format!("{MESSAGE}["), "{}", "]}]}"),
        ),
        (
            "bare parts",
            ApiKind::ChatCompletions,
            largest_parsed(&format!("{MESSAGE}["), r#""""#, "]}]}"),
        ),
        (
            "tools",
            ApiKind::ChatCompletions,
            largest_parsed(&format!("{MESSAGE}\"x\"}}],\"tools\":["), "0", "]}"),
        ),
        (
            "lists",
            ApiKind::ChatCompletions,
            largest_parsed(&format!("{MESSAGE}\"x\"}}],\"documents\":["), "[]", "]}"),
        ),
        (
            "objects",
            ApiKind::ChatCompletions,
            largest_parsed(
                &format!("{MESSAGE}\"x\"}}],\"documents\":["),
                r#"{"":0}"#,
                "]}",
            ),
        ),
        (
            "turns",
            ApiKind::Messages,
            largest_parsed(
                r#"{"model":"m","messages":["#,
                r#"{"role":"user","content":""}"#,
                "]}",
            ),
        ),
    ]
}

#[expect(clippy::print_stdout, reason = "figures of a test")]
fn parsed_requests_use_little_memory() {
    for (name, api, body) in largest_parsed_bodies() {
        let took = peak(|| {
            assert_ne!(
                parse(api, &body).unwrap().prompt,
                PromptInput::OverLimit,
                "{name}"
            )
        });
        println!(
            "{name}, largest parsed body: {} MiB for {} KiB",
            took / MIB,
            body.len() >> 10
        );
        assert!(took < 96 * MIB, "{name}: {} MiB", took / MIB);
    }
}

fn response_scanners_use_little_memory() {
    for kind in [ResponseEncoding::EventStream, ResponseEncoding::Document] {
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
