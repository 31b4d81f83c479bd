//! What gateways and operators may ask for beyond the plain way: names, lists, edits, parts of bodies, other eyes.

use super::*;
use crate::ext_proc::config::Observe;
use crate::ext_proc::headers::AnsweredBy;
use crate::ext_proc::metadata::Told;

fn with(options: Options) -> Exchange {
    let modes = Modes {
        request: BodyMode::Buffered,
        response: BodyMode::None,
    };
    let mut exchange = exchange_with(options, Start::default(), modes);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    exchange
}

fn edited(body: &'static [u8]) -> Directions {
    let restore = Some(Renamed {
        served: "target".into(),
        asked: "asked-for".into(),
    });
    let edit = Some(Edit {
        body: body.into(),
        restore,
    });
    Directions {
        edit,
        ..to_worker().into()
    }
}

#[test]
fn the_route_is_looked_for_again_where_that_is_wanted() {
    let mut exchange = with(Options {
        clear_route_cache: true,
        ..options()
    });
    let line = short(exchange.on_route(to_worker())).remove(0);
    assert!(line.contains(" +route"), "{line}");
    let mut exchange = with(Options {
        clear_route_cache: true,
        ..options()
    });
    assert_eq!(short(exchange.on_route(to_nobody())), ["request body"]);
}

#[test]
fn a_list_of_endpoints_is_the_same_in_header_and_metadata_and_scores_are_beside_it() {
    let second = "[2001:db8::1]:8000".parse().unwrap();
    let first = to_worker().to.unwrap().endpoint;
    let steer = Steer {
        fallbacks: vec![second],
        scores: vec![(first, 0.0), (second, 3.0)],
        ..to_worker()
    };
    let mut exchange = with(options());
    let Effect::Reply(reply) = exchange.on_route(steer).remove(0) else {
        panic!("no reply")
    };
    let lb = &reply.dynamic_metadata.as_ref().unwrap().fields["envoy.lb"];
    let text = format!("{lb:?}");
    assert!(text.contains("10.0.0.1:8000,[2001:db8::1]:8000"), "{text}");
    assert!(
        text.contains("NumberValue(1.0)") && text.contains("NumberValue(0.25)"),
        "{text}"
    );
    let line = short_one(Effect::Reply(reply));
    assert!(
        line.contains("x-gateway-destination-endpoint=10.0.0.1:8000,[2001:db8::1]:8000"),
        "{line}"
    );
}

#[test]
fn an_edited_body_goes_on_with_its_own_length_and_the_answer_names_the_model_that_was_asked_for() {
    let mut exchange = with(options());
    let lines = short(exchange.on_route(edited(b"{\"model\":\"target\"}")));
    let expected = format!(
        "request body content-length=18 {} body {{\"model\":\"target\"}} +metadata",
        STEERED.strip_suffix(" +metadata").unwrap()
    );
    assert_eq!(lines, [expected]);
    let head = "response headers x-warmroute-mode=exact -content-length mode 2/1";
    assert_eq!(
        short(exchange.on_message(response(false, false))),
        [head, "status 200", "first token"]
    );
    let first = short(exchange.on_message(answer(b"{\"id\":1,\"mod", false)));
    let second = short(exchange.on_message(answer(b"el\": \"target\"}", true)));
    let body = |lines: &[String]| {
        lines[0]
            .strip_prefix("response body body ")
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        body(&first) + &body(&second),
        "{\"id\":1,\"model\": \"asked-for\"}"
    );
}

#[test]
fn an_edited_body_goes_back_whole_in_full_duplex() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::FullDuplex);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{\"model\":\"asked-for\"}", false));
    exchange.on_message(body(b"", true));
    let lines = short(exchange.on_route(edited(b"{\"model\":\"target\"}")));
    assert_eq!(
        lines,
        [
            format!("request headers content-length=18 {STEERED}"),
            "request body 18 end".into()
        ]
    );
    exchange.on_message(response(true, false));
    let lines = short(exchange.on_message(answer(b"data: {\"model\":\"target\"}\n\n", true)));
    assert_eq!(lines[0], "response body 29 end");
}

#[test]
fn a_partly_buffered_body_is_routed_by_its_beginning() {
    let mut partial = exchange(BodyMode::BufferedPartial, BodyMode::None);
    partial.on_message(headers(CHAT, false));
    assert_eq!(
        short(partial.on_message(body(b"{\"a", false))),
        ["route cut 3 of None"]
    );
    let mut whole = exchange(BodyMode::BufferedPartial, BodyMode::None);
    whole.on_message(headers(CHAT, false));
    assert_eq!(
        short(whole.on_message(body(b"{}", true))),
        ["route whole 2"]
    );
    // A buffered body that trailers follow is all there is.
    let mut trailers = exchange(BodyMode::Buffered, BodyMode::None);
    trailers.on_message(headers(CHAT, false));
    assert_eq!(
        short(trailers.on_message(body(b"{}", false))),
        ["route whole 2"]
    );
}

#[test]
fn a_body_that_takes_too_long_in_full_duplex_is_routed_by_what_has_come_and_passes_whole() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    let head = RequestHead {
        path: CHAT.into(),
        content_length: Some(9),
        ..RequestHead::default()
    };
    exchange.on_message(Message::RequestHeaders { head, end: false });
    assert!(exchange.is_gathering());
    exchange.on_message(body(b"{\"mod", false));
    assert_eq!(exchange.held(), 5);
    assert_eq!(short(exchange.on_deadline()), ["route cut 5 of Some(9)"]);
    assert!(!exchange.is_gathering());
    let expected = [
        format!("request headers content-length=9 {STEERED}"),
        "request body 5".into(),
    ];
    assert_eq!(short(exchange.on_route(to_worker())), expected);
    assert!(exchange.on_deadline().is_empty(), "only once");
    assert_eq!(
        short(exchange.on_message(body(b"el\"}", true))),
        ["request body 4 end"]
    );
    let mut buffered = super::exchange(BodyMode::Buffered, BodyMode::None);
    buffered.on_message(headers(CHAT, false));
    assert!(
        buffered.on_deadline().is_empty(),
        "there Envoy holds the body"
    );
}

#[test]
fn where_another_filter_sees_the_first_token_the_body_is_not_asked_for() {
    let start = Start {
        probed_as: Some("7".into()),
        ..Start::default()
    };
    let mut exchange = exchange_with(
        options(),
        start,
        Modes {
            request: BodyMode::Buffered,
            response: BodyMode::None,
        },
    );
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{}", true));
    let Effect::Reply(reply) = exchange.on_route(to_worker()).remove(0) else {
        panic!("no reply")
    };
    assert!(
        reply
            .dynamic_metadata
            .unwrap()
            .fields
            .contains_key("warmroute")
    );
    let head = ["response headers x-warmroute-mode=exact", "status 200"];
    assert_eq!(short(exchange.on_message(response(true, false))), head);
    assert!(exchange.awaits_first_token());
    assert_eq!(short(exchange.on_first_token()), ["first token"]);
    assert!(exchange.on_first_token().is_empty(), "only once");
}

#[test]
fn what_is_shown_of_an_answer_is_what_is_asked_for() {
    let plain = [
        "response headers x-warmroute-mode=exact",
        "status 200",
        "first token",
    ];
    let watched = [
        "response headers x-warmroute-mode=exact mode 2/1",
        "status 200",
        "first token",
    ];
    let headers_only = Directions {
        first_token_with_headers: true,
        ..to_worker().into()
    };
    let cases: [(Observe, bool, Directions, bool, &[&str]); 6] = [
        (Observe::Off, false, to_worker().into(), true, &plain),
        (Observe::FirstToken, false, headers_only, true, &plain),
        (
            Observe::FirstToken,
            false,
            to_worker().into(),
            true,
            &watched[..2],
        ),
        (Observe::Usage, false, to_worker().into(), false, &watched),
        (
            Observe::Sampled(0.5),
            true,
            to_worker().into(),
            false,
            &watched,
        ),
        (
            Observe::Sampled(0.5),
            false,
            to_worker().into(),
            false,
            &plain,
        ),
    ];
    for (observe, sampled, directions, event_stream, expected) in cases {
        let start = Start {
            sampled,
            ..Start::default()
        };
        let modes = Modes {
            request: BodyMode::Buffered,
            response: BodyMode::None,
        };
        let mut exchange = exchange_with(
            Options {
                observe,
                ..options()
            },
            start,
            modes,
        );
        exchange.on_message(headers(CHAT, false));
        exchange.on_message(body(b"{}", true));
        exchange.on_route(directions);
        assert_eq!(
            short(exchange.on_message(response(event_stream, false))),
            expected,
            "{observe} {sampled}"
        );
    }
}

#[test]
fn the_subset_may_come_with_the_headers_or_with_the_body() {
    let subset = |entries: &str| Told {
        subset: Some(Subset::parse([entries])),
        ..Told::default()
    };
    for with_body in [false, true] {
        let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
        exchange.hear(if with_body {
            Told::default()
        } else {
            subset("10.0.0.1:8000")
        });
        exchange.on_message(headers(CHAT, false));
        exchange.hear(if with_body {
            subset("10.0.0.1:8000")
        } else {
            Told::default()
        });
        let Effect::Route(inbound) = exchange.on_message(body(b"{}", true)).remove(0) else {
            panic!("no route")
        };
        assert_eq!(
            inbound.subset,
            Some(Subset::parse(["10.0.0.1:8000"])),
            "{with_body}"
        );
    }
}

#[test]
fn the_pool_may_come_with_the_headers_or_with_the_body() {
    let pool = |name: &str| Told {
        pool: Some(name.to_owned()),
        ..Told::default()
    };
    for (first, second, expected) in [
        (pool("p"), Told::default(), Some("p")),
        (Told::default(), pool("p"), Some("p")),
        (pool("p"), pool("q"), Some("q")),
        (Told::default(), Told::default(), None),
    ] {
        let mut exchange = exchange(BodyMode::Buffered, BodyMode::None);
        exchange.hear(first);
        exchange.on_message(headers(CHAT, false));
        exchange.hear(second);
        let Effect::Route(inbound) = exchange.on_message(body(b"{}", true)).remove(0) else {
            panic!("no route")
        };
        assert_eq!(inbound.pool.as_deref(), expected);
    }
}

#[test]
fn a_request_without_a_name_gets_one() {
    let start = Start {
        request_id: "made".into(),
        ..Start::default()
    };
    let modes = Modes {
        request: BodyMode::FullDuplex,
        response: BodyMode::None,
    };
    let mut exchange = exchange_with(options(), start, modes);
    exchange.on_message(headers(CHAT, true));
    let line = short(exchange.on_route(to_worker())).remove(0);
    assert!(line.contains(" x-request-id=made "), "{line}");
}

#[test]
fn conformance_tests_are_told_who_was_chosen_and_who_served() {
    let mut exchange = with(Options {
        conformance: true,
        ..options()
    });
    let line = short(exchange.on_route(to_worker())).remove(0);
    assert!(
        line.contains("x-echo-set-header=x-conformance-test-served-endpoint:10.0.0.1:8000"),
        "{line}"
    );
    let from = AnsweredBy::Worker("10.0.0.2:8000".parse().unwrap());
    let head = ResponseHead {
        status: 200,
        from,
        ..ResponseHead::default()
    };
    let line = short(exchange.on_message(Message::ResponseHeaders { head, end: true })).remove(0);
    assert!(
        line.ends_with("x-conformance-test-served-endpoint=10.0.0.2:8000"),
        "{line}"
    );
    let mut exchange = with(Options {
        conformance: true,
        ..options()
    });
    exchange.on_route(to_worker());
    let line = short(exchange.on_message(response(false, true))).remove(0);
    assert!(
        line.contains("x-conformance-test-served-endpoint=fail:"),
        "{line}"
    );
}

#[test]
fn what_envoy_would_not_show_is_not_waited_for() {
    let mut exchange = exchange(BodyMode::FullDuplex, BodyMode::None);
    exchange.on_message(headers(CHAT, false));
    exchange.on_message(body(b"{\"model\":\"asked-for\"}", true));
    exchange.on_route(edited(b"{\"model\":\"target\"}"));
    let head = [
        "response headers x-warmroute-mode=exact",
        "status 200",
        "first token",
    ];
    assert_eq!(short(exchange.on_message(response(true, false))), head);
}

#[test]
fn answers_are_looked_at_only_where_their_usage_is_wanted() {
    for (observe, expected) in [
        (Observe::FirstToken, &["response body", "first token"][..]),
        (
            Observe::Usage,
            &["response body", "first token", "answer 4"],
        ),
    ] {
        let mut exchange = with(Options {
            observe,
            ..options()
        });
        exchange.on_route(to_worker());
        exchange.on_message(response(true, false));
        assert_eq!(
            short(exchange.on_message(answer(b"data", false))),
            expected,
            "{observe}"
        );
    }
}
