//! Optional behavior of gateways and operators: names, endpoint lists, edited and partial bodies,
//! other filters.

use super::*;
use crate::ext_proc::config::ObserveMode;
use crate::ext_proc::metadata::GatewayMetadata;

fn pending_route(options: ExchangeOptions) -> Exchange {
    let modes = BodyModes {
        request: BodyMode::Buffered,
        response: BodyMode::None,
    };
    let mut exchange = exchange_with(options, ExchangeStart::default(), modes);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    exchange
}

fn reply_with_edit(body: &'static [u8]) -> RouteReply {
    let restore = Some(ModelRename {
        served: "target".into(),
        requested: "requested".into(),
    });
    let edit = Some(BodyEdit {
        body: body.into(),
        model_rename: restore,
    });
    RouteReply {
        body_edit: edit,
        ..to_worker().into()
    }
}

#[test]
fn late_full_duplex_body_is_routed_and_unchanged() {
    let mut exchange = exchange(BodyMode::FullDuplexStreamed, BodyMode::None);
    let head = RequestHead {
        path: CHAT.into(),
        content_length: Some(9),
        ..RequestHead::default()
    };
    exchange.on_message(ExchangeMessage::RequestHeaders {
        head,
        end_of_stream: false,
    });
    assert!(exchange.is_gathering());
    exchange.on_message(body(b"{\"mod", false));
    assert_eq!(exchange.buffered_bytes(), 5);
    assert_eq!(
        describe(exchange.on_deadline()),
        ["route truncated 5 of Some(9)"]
    );
    assert!(!exchange.is_gathering());
    let expected = [
        format!("request headers content-length=9 {ROUTE_HEADERS}"),
        "request body 5".into(),
    ];
    assert_eq!(describe(exchange.on_route(to_worker())), expected);
    assert!(exchange.on_deadline().is_empty(), "only once");
    assert_eq!(
        describe(exchange.on_message(body(b"el\"}", true))),
        ["request body 4 end"]
    );
    let mut buffered = super::exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    assert!(
        buffered.on_deadline().is_empty(),
        "in buffered mode, Envoy buffers the body"
    );
}

#[test]
fn response_id_is_read_if_response_is_stored() {
    let event: &[u8] =
        b"data: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"output\":[]}}\n\n";
    let document: &[u8] = b"{\"id\":\"resp_1\",\"output\":[{\"id\":\"msg\"}]}";
    let modes = [
        (BodyMode::Buffered, BodyMode::None),
        (BodyMode::Buffered, BodyMode::Streamed),
        (BodyMode::FullDuplexStreamed, BodyMode::FullDuplexStreamed),
    ];
    let observations = [
        ObserveMode::Off,
        ObserveMode::FirstToken,
        ObserveMode::Usage,
        ObserveMode::Sampled(0.0),
    ];
    for (at, (request, response_mode)) in modes.into_iter().enumerate() {
        for observe in observations {
            for (is_stored, key) in [(true, None), (true, Some("7")), (false, None)] {
                let options = ExchangeOptions {
                    observe,
                    ..options()
                };
                let start = ExchangeStart {
                    exchange_key: key.map(str::to_owned),
                    ..ExchangeStart::default()
                };
                let modes = BodyModes {
                    request,
                    response: response_mode,
                };
                for (bytes, is_stream) in [(event, true), (document, false)] {
                    let mut exchange = exchange_with(options.clone(), start.clone(), modes);
                    exchange.on_message(headers("/v1/responses", false));
                    exchange.on_message(body(b"{}", true));
                    exchange.on_route(RouteReply {
                        may_store_response: is_stored,
                        ..to_worker().into()
                    });
                    let begun = describe(exchange.on_message(response(is_stream, false)));
                    let is_requested = begun[0].contains(" mode ");
                    let is_shown = response_mode != BodyMode::None || is_requested;
                    if is_stored && observe != ObserveMode::Off {
                        assert!(is_shown, "{at} {observe} {begun:?}");
                    }
                    let (first, rest) = bytes.split_at(bytes.len() / 2);
                    let mut effects = Vec::new();
                    for piece in [first, rest].into_iter().filter(|_| is_shown) {
                        effects.extend(describe(exchange.on_message(response_body(piece, false))));
                    }
                    let stored = effects.iter().filter(|line| *line == "stored resp_1");
                    assert_eq!(
                        stored.count(),
                        usize::from(is_stored && is_shown),
                        "{at} {observe} {effects:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn pool_is_accepted_with_headers_or_body() {
    let pool = |name: &str| GatewayMetadata {
        pool: Some(name.to_owned()),
        ..GatewayMetadata::default()
    };
    for (first, second, expected) in [
        (pool("p"), GatewayMetadata::default(), Some("p")),
        (GatewayMetadata::default(), pool("p"), Some("p")),
        (pool("p"), pool("q"), Some("q")),
        (GatewayMetadata::default(), GatewayMetadata::default(), None),
    ] {
        let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
        exchange.apply_metadata(first);
        exchange.on_message(headers(CHAT, false));
        exchange.apply_metadata(second);
        let Effect::Route(inbound) = exchange.on_message(body(b"{}", true)).remove(0) else {
            panic!("no route")
        };
        assert_eq!(inbound.pool.as_deref(), expected);
    }
}

#[test]
fn first_token_is_not_awaited_without_response_body() {
    let mut exchange = exchange(BodyMode::FullDuplexStreamed, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{\"model\":\"requested\"}", true));
    exchange.on_route(reply_with_edit(b"{\"model\":\"target\"}"));
    let head = [
        "response headers x-warmroute-mode=exact",
        "status 200",
        "first token",
    ];
    assert_eq!(describe(exchange.on_message(response(true, false))), head);
}

#[test]
fn usage_is_scanned_only_if_configured() {
    for (observe, expected) in [
        (
            ObserveMode::FirstToken,
            &["response body", "first token"][..],
        ),
        (
            ObserveMode::Usage,
            &["response body", "first token", "response chunk 4"],
        ),
    ] {
        let mut exchange = pending_route(ExchangeOptions {
            observe,
            ..options()
        });
        exchange.on_route(to_worker());
        exchange.on_message(response(true, false));
        assert_eq!(
            describe(exchange.on_message(response_body(b"text", false))),
            expected,
            "{observe}"
        );
    }
}
