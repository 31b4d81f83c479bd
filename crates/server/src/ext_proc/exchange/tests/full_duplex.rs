//! Bodies in full-duplex mode, and trailers.

use super::*;

#[test]
fn full_duplex_delays_header_reply_and_returns_body() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    assert!(exchange.on_message(headers(CHAT, false)).is_empty());
    assert!(exchange.on_message(body(&[1; 100_000], false)).is_empty());
    assert!(exchange.on_message(body(&[2; 50_000], false)).is_empty());
    assert_eq!(
        describe(exchange.on_message(body(b"", true))),
        ["route whole 150000"]
    );
    assert!(
        exchange.on_message(body(b"", true)).is_empty(),
        "a second end of stream is ignored"
    );
    let expected = [
        format!("request headers content-length=150000 {ROUTE_HEADERS}"),
        "request body 62000".into(),
        "request body 62000".into(),
        "request body 26000 end".into(),
    ];
    assert_eq!(describe(exchange.on_route(to_worker())), expected);
}

#[test]
fn full_duplex_request_ends_with_its_trailers() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"abc", false));
    assert_eq!(
        describe(exchange.on_message(ExchangeMessage::RequestTrailers)),
        ["route whole 3"]
    );
    let expected = [
        format!("request headers {ROUTE_HEADERS}"),
        "request body 3".into(),
        "request trailers".into(),
    ];
    assert_eq!(describe(exchange.on_route(to_worker())), expected);
}

#[test]
fn trailers_without_body_get_one_reply() {
    let mut duplex = exchange(BodyMode::FullDuplex, BodyMode::None);
    duplex.on_message(headers(CHAT, false));
    assert_eq!(
        describe(duplex.on_message(ExchangeMessage::RequestTrailers)),
        ["route whole 0"]
    );
    assert_eq!(
        describe(duplex.on_route(to_worker())),
        [
            format!("request headers {ROUTE_HEADERS}"),
            "request trailers".into()
        ]
    );
    let mut buffered = exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    assert_eq!(
        describe(buffered.on_message(ExchangeMessage::RequestTrailers)),
        ["request trailers"]
    );
}

#[test]
fn full_duplex_response_is_returned_byte_for_byte() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::FullDuplex);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    exchange.on_route(to_worker());
    let expected = ["response headers x-warmroute-mode=exact", "status 200"];
    assert_eq!(
        describe(exchange.on_message(response(true, false))),
        expected
    );
    let first = ["response body 62000", "response body 1000", "first token"];
    assert_eq!(
        describe(exchange.on_message(response_body(&[7; 63_000], false))),
        first
    );
    assert_eq!(
        describe(exchange.on_message(response_body(b"", true))),
        ["response body 0 end", "finished"]
    );
}
