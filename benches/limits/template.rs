//! Rendering of a conversation with its template, compared with hand-written code for that
//! template.

use serde_json::Value;
use warmroute_tokens::openai::{self, ApiKind};

use super::LimitRun;
use super::chats::{body, encoder, messages, render_by_hand};
use warmroute_testbed::comparison::{ComparedMeasure, measure_cpu};

/// Renderings per round, so that the cost of reading the clock is negligible.
const TIMES: usize = 20;
/// Maximum duration of a known template in microseconds.
const GOAL: f64 = 10.0;

/// Returns the mean CPU time of one call, in microseconds.
fn microseconds(call: impl Fn() -> usize) -> f64 {
    let total = measure_cpu(|| {
        (0..TIMES)
            .map(|_| std::hint::black_box(call()))
            .sum::<usize>()
    });
    total / 1e3 / TIMES as f64
}

pub(super) fn measure(run: &mut LimitRun) {
    let encoder = encoder(0);
    for (name, count, bytes) in [
        ("50 messages of 80 B", 50, 80),
        ("50 messages of 2.6 KB", 50, 2600),
        ("500 messages of 2.6 KB", 500, 2600),
    ] {
        let messages = messages(0, count, bytes);
        let request = openai::parse(ApiKind::ChatCompletions, &body(&messages)).expect("a chat");
        let field =
            |message: &'_ Value, name: &str| message[name].as_str().expect("a string").to_owned();
        let parts: Vec<(String, String)> = messages
            .iter()
            .map(|message| (field(message, "role"), field(message, "content")))
            .collect();
        let hand = || {
            let parts = parts
                .iter()
                .map(|(role, text)| (role.as_str(), text.as_str()));
            render_by_hand(parts, count * bytes)
        };
        assert_eq!(
            encoder
                .render(&request)
                .expect("the template renders it")
                .texts()[0],
            hand()
        );
        let hand_written = || microseconds(|| hand().len());
        let render = || {
            encoder
                .render(&request)
                .expect("the template renders it")
                .texts()[0]
                .len()
        };
        let ours = || microseconds(render);
        run.compare(
            ComparedMeasure::new(&format!("chat template, {name}"), "µs", None),
            hand_written,
            ours,
        );
        if bytes * count == 50 * 2600 {
            run.compare(
                ComparedMeasure::new(
                    &format!("chat template, {name}, beside {GOAL} µs"),
                    "µs",
                    Some(1.0),
                ),
                || GOAL,
                ours,
            );
        }
    }
}
