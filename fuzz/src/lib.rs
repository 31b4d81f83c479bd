//! The targets that `tests/fuzz.rs` runs for a moment, for as long as one likes.

#[path = "../../tests/fuzz/answers.rs"]
mod answers;
#[path = "../../tests/fuzz/bodies.rs"]
mod bodies;
#[path = "../../tests/fuzz/exchange.rs"]
mod exchange;
#[path = "../../tests/fuzz/input.rs"]
mod input;
#[path = "../../tests/fuzz/requests.rs"]
mod requests;
#[path = "../../tests/fuzz/watch.rs"]
mod watch;
#[path = "../../crates/zmtp/tests/fuzz/target.rs"]
mod zmtp;

/// What is read from answers, and changed in them.
pub fn answers(input: &[u8]) {
    answers::answers(input);
}

/// What is read from bodies, and changed in them.
pub fn bodies(input: &[u8]) {
    bodies::bodies(input);
}

/// One exchange, message by message.
pub fn exchange(input: &[u8]) {
    exchange::exchange(input);
}

/// Whole requests.
pub fn requests(input: &[u8]) {
    requests::requests(input);
}

/// The bytes of a ZMTP peer, through a socket pair.
pub fn zmtp(input: &[u8]) {
    zmtp::run(input);
}
