//! A complete decision in process for texts of this repository with tool calls, which have as many
//! JSON escapes as the prompts of coding agents. The limit is one copy of the body and the
//! tokenization of the new text with warm word caches.

use bytes::Bytes;
use fastokens::Tokenizer;
use warmroute_load::repository_texts::{NewText, TextRotation, message_texts};
use warmroute_testbed::comparison::{ComparedMeasure, measure_cpu};

use super::LimitRun;
use super::bed::DecisionPipeline;
use super::chats::{encoder, fast_library};

const RANKS: u32 = 64;
const SEED: u64 = 7;

pub(super) fn measure(run: &mut LimitRun) {
    for (size, bytes) in [
        ("1 KB", 1_000),
        ("32 KB", 32_000),
        ("220 KB", 220_000),
        ("400 KB", 400_000),
    ] {
        for (state, new_text) in [
            ("continued", NewText::Message),
            ("new", NewText::Conversation),
        ] {
            let name = format!("whole decision, source code and tool calls, {size}, {state}");
            if run.wants(&name) {
                measure_bodies(run, &name, bytes, new_text);
            }
        }
    }
}

/// Decides bodies in turn, after one body of each conversation.
fn measure_bodies(run: &mut LimitRun, name: &str, bytes: usize, new_text: NewText) {
    let mut texts = TextRotation::open("m", bytes, new_text, SEED).expect("the repository");
    let library = fast_library();
    let pipeline = DecisionPipeline::new(encoder(1 << 30), RANKS);
    for body in texts.first_bodies() {
        pipeline.decide(&body).into_hashes();
        minimum_micros(&library, &body, new_text);
    }
    let mut limits = Vec::new();
    let mut ours = Vec::new();
    for body in texts.next_bodies(run.rounds) {
        limits.push(minimum_micros(&library, &body, new_text));
        let decision = pipeline.decide(&body);
        ours.push(decision.micros);
        decision.into_hashes();
    }
    run.add(ComparedMeasure::new(name, "µs", None), &limits, &ours);
}

/// Returns the microseconds of one copy of the body and of the tokenization of its new text.
fn minimum_micros(library: &Tokenizer, body: &Bytes, new_text: NewText) -> f64 {
    let texts = message_texts(body).expect("a chat");
    let new_texts = match new_text {
        NewText::Message => texts.last().map(std::slice::from_ref).unwrap_or_default(),
        NewText::Conversation | NewText::Tenth => &texts[..],
    };
    let nanos = measure_cpu(|| {
        std::hint::black_box(body.to_vec());
        for text in new_texts {
            std::hint::black_box(library.encode(text).expect("its tokens"));
        }
    });
    nanos / 1e3
}
