//! From a conversation to the text of its prompt, beside code that was written for this one template.

use warmroute::openai::{self, Api};

use super::Run;
use super::chats::{body, by_hand, encoder, messages};
use super::duel::cpu;

/// Times that one round renders, so that the clock is no part of it.
const TIMES: usize = 20;
/// What a known template may take.
const GOAL: f64 = 10.0;

pub(super) fn measure(run: &mut Run) {
    let encoder = encoder(0);
    for (name, count, bytes) in [
        ("50 messages of 80 B", 50, 80),
        ("50 messages of 2.6 KB", 50, 2600),
        ("500 messages of 2.6 KB", 500, 2600),
    ] {
        let messages = messages(0, count, bytes);
        let request = openai::parse(Api::ChatCompletions, &body(&messages)).expect("a chat");
        let said = || {
            messages
                .iter()
                .map(|message| (message["role"].as_str(), message["content"].as_str()))
        };
        let said: Vec<(&str, &str)> = said()
            .map(|(role, text)| (role.expect("one"), text.expect("one")))
            .collect();
        let hand = || by_hand(said.iter().copied(), count * bytes);
        assert_eq!(
            encoder
                .render(&request)
                .expect("the template takes it")
                .texts()[0],
            hand()
        );
        let theirs = || {
            cpu(|| {
                (0..TIMES)
                    .map(|_| std::hint::black_box(hand()).len())
                    .sum::<usize>()
            }) / 1e3
                / TIMES as f64
        };
        let render = || {
            encoder
                .render(&request)
                .expect("the template takes it")
                .texts()[0]
                .len()
        };
        let ours = || {
            cpu(|| {
                (0..TIMES)
                    .map(|_| std::hint::black_box(render()))
                    .sum::<usize>()
            }) / 1e3
                / TIMES as f64
        };
        run.duel(
            (&format!("chat template, {name}"), "us", None),
            theirs,
            ours,
        );
        if bytes * count == 50 * 2600 {
            run.duel(
                (
                    &format!("chat template, {name}, beside {GOAL} us"),
                    "us",
                    Some(1.0),
                ),
                || GOAL,
                ours,
            );
        }
    }
}
