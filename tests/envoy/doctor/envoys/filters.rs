//! Faults of the main filter and of the probe filter.

use super::*;

/// Faults of the main filter.
pub(super) const FILTER_FAULTS: &[EnvoyFault] = &[
    standalone(
        "no filter at all",
        |sides| {
            sides
                .filters()
                .retain(|filter| filter["name"] == "envoy.filters.http.router")
        },
        &[(Error, "envoy.filter")],
        "add the filter `envoy.filters.http.ext_proc` and the cluster `ext_proc`",
    ),
    standalone(
        "switched off on every route",
        |sides| {
            let off = sides.host()["routes"][1]["typed_per_filter_config"].clone();
            sides.host()["routes"][0]["typed_per_filter_config"] = off;
        },
        &[(Error, "envoy.filter")],
        "remove `disabled: true` for `envoy.filters.http.ext_proc`",
    ),
    standalone(
        "another socket",
        |sides| sides.ours["listeners"]["ext_proc"] = json!({"address": "127.0.0.1:9002"}),
        &[(Error, "envoy.address"), (Error, "envoy.probe")],
        "address: {socket_address: {address: 127.0.0.1, port_value: 9002}}",
    ),
    standalone(
        "only watched",
        |sides| sides.main()["observability_mode"] = json!(true),
        &[(Error, "envoy.observability")],
        "`observability_mode: false`",
    ),
    standalone(
        "no bodies",
        |sides| sides.modes()["request_body_mode"] = json!("NONE"),
        &[(Error, "envoy.request_body")],
        "`request_body_mode: BUFFERED` under `processing_mode`",
    ),
    standalone(
        "streamed bodies",
        |sides| sides.modes()["request_body_mode"] = json!("STREAMED"),
        &[(Error, "envoy.request_body")],
        "`request_body_mode: BUFFERED` under `processing_mode`",
    ),
    standalone(
        "no headers",
        |sides| sides.modes()["request_header_mode"] = json!("SKIP"),
        &[(Error, "envoy.request_headers")],
        "`request_header_mode: SEND`",
    ),
    standalone(
        "no headers of answers",
        |sides| sides.modes()["response_header_mode"] = json!("SKIP"),
        &[(Warning, "envoy.response_headers")],
        "`response_header_mode: SEND`",
    ),
    standalone(
        "no trailers of answers",
        |sides| sides.modes()["response_trailer_mode"] = json!("SKIP"),
        &[(Error, "envoy.response_trailers")],
        "`response_trailer_mode: SEND`",
    ),
    standalone(
        "every token",
        |sides| sides.modes()["response_body_mode"] = json!("STREAMED"),
        &[(Warning, "envoy.response_body")],
        "`response_body_mode: NONE`",
    ),
    standalone(
        "answers held back",
        |sides| sides.modes()["response_body_mode"] = json!("BUFFERED"),
        &[(Error, "envoy.response_body")],
        "`response_body_mode: NONE`",
    ),
    standalone(
        "500 without us",
        |sides| sides.main()["failure_mode_allow"] = json!(false),
        &[(Warning, "envoy.failure_mode")],
        "`failure_mode_allow: true`",
    ),
    standalone(
        "no time",
        |sides| EnvoySides::without(sides.main(), "message_timeout"),
        &[(Error, "envoy.message_timeout")],
        "`message_timeout: 1s`",
    ),
    standalone(
        "no time for waiting",
        |sides| {
            EnvoySides::without(sides.main(), "max_message_timeout");
            sides.ours["queue"] = json!({"prefill_busy_threshold": 8192});
        },
        &[(Error, "envoy.max_message_timeout")],
        "`max_message_timeout: 30.5s`",
    ),
    standalone(
        "no time for so much waiting",
        |sides| sides.ours["queue"] = json!({"prefill_busy_threshold": 8192, "timeout": "2m"}),
        &[(Error, "envoy.max_message_timeout")],
        "`max_message_timeout: 120.5s`",
    ),
    standalone(
        "ended while it waits",
        |sides| {
            sides.main()["max_message_timeout"] = json!("1000s");
            sides.ours["queue"] = json!({"prefill_busy_threshold": 8192, "timeout": "11m"});
        },
        &[(Error, "envoy.idle_timeout")],
        "`stream_idle_timeout: 1260.5s`",
    ),
    standalone(
        "no wishes",
        |sides| sides.main()["allow_mode_override"] = json!(false),
        &[(Warning, "envoy.mode_override")],
        "`allow_mode_override: true`",
    ),
    standalone(
        "no response attributes",
        |sides| EnvoySides::without(sides.main(), "response_attributes"),
        &[(Warning, "envoy.response_attributes")],
        "`response_attributes: [upstream.address, response.flags]`",
    ),
    of(
        "gateway-api",
        standalone(
            "full duplex without lengths",
            |sides| EnvoySides::without(sides.main(), "allow_content_length_header"),
            &[(Warning, "envoy.full_duplex")],
            "`allow_content_length_header: true`",
        ),
    ),
    of(
        "gateway-api",
        standalone(
            "full duplex, and to be served without us",
            |sides| sides.ours["gateway"]["failure"] = json!({"mode": "fail_open"}),
            &[(Warning, "envoy.failure_mode")],
            "`gateway: {failure: {mode: fail_closed}}`",
        ),
    ),
];

/// Faults of the first-token probe.
pub(super) const PROBE_FAULTS: &[EnvoyFault] = &[
    standalone(
        "the probe behind the other filter",
        |sides| sides.filters().swap(0, 1),
        &[(Error, "envoy.probe_order")],
        "move `first_token_probe` before `envoy.filters.http.ext_proc`",
    ),
    standalone(
        "a probe that cuts answers",
        |sides| sides.probe()["failure_mode_allow"] = json!(false),
        &[(Warning, "envoy.probe")],
        "`failure_mode_allow: true`",
    ),
    standalone(
        "a probe that holds answers up",
        |sides| sides.probe()["message_timeout"] = json!("10s"),
        &[(Warning, "envoy.probe")],
        "`message_timeout: 0.3s`",
    ),
    standalone(
        "a probe that does not say so",
        |sides| EnvoySides::without(&mut sides.probe()["grpc_service"], "initial_metadata"),
        &[(Warning, "envoy.probe")],
        "`initial_metadata: [{key: x-warmroute-filter, value: probe}]`",
    ),
    standalone(
        "a probe that is not there",
        |sides| {
            sides
                .filters()
                .retain(|filter| filter["name"] != "first_token_probe")
        },
        &[(Warning, "envoy.probe")],
        "remove x-warmroute-filter",
    ),
    standalone(
        "first tokens without an exchange",
        |sides| EnvoySides::without(sides.probe(), "metadata_options"),
        &[(Warning, "envoy.probe")],
        "`warmroute` into `forwarding_namespaces",
    ),
];
