//! The fuzz targets, which `tests/server/fuzz.rs` also runs for a short time.

#[path = "../../tests/server/fuzz/bodies.rs"]
mod bodies;
#[path = "../../tests/server/fuzz/input.rs"]
mod input;
#[path = "../../tests/server/fuzz/requests.rs"]
mod requests;
#[path = "../../tests/server/fuzz/responses.rs"]
mod responses;
#[path = "../../crates/zmtp/tests/fuzz/target.rs"]
mod zmtp;

/// Fuzzes parsing and editing of request bodies.
pub fn bodies(input: &[u8]) {
    bodies::bodies(input);
}

/// Fuzzes complete requests.
pub fn requests(input: &[u8]) {
    requests::requests(input);
}

/// Fuzzes parsing and rewriting of responses.
pub fn responses(input: &[u8]) {
    responses::responses(input);
}

/// Fuzzes the bytes of a ZMTP peer, through a socket pair.
pub fn zmtp(input: &[u8]) {
    zmtp::run(input);
}
