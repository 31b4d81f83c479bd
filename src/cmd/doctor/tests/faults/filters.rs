//! Faults of the main filter and of the probe filter.

use super::*;

/// Faults of the main filter.
pub(super) const FILTER_FAULTS: &[EnvoyFault] = &[
    standalone(
        "no ext_proc filter",
        |configs| {
            configs
                .filters()
                .retain(|filter| filter["name"] == "envoy.filters.http.router")
        },
        &[(Error, "envoy.filter")],
        "add the filter `envoy.filters.http.ext_proc` and the cluster `ext_proc`",
    ),
    standalone(
        "filter disabled on every route",
        |configs| {
            let off = configs.host()["routes"][1]["typed_per_filter_config"].clone();
            configs.host()["routes"][0]["typed_per_filter_config"] = off;
        },
        &[(Error, "envoy.filter")],
        "remove `disabled: true` for `envoy.filters.http.ext_proc`",
    ),
    standalone(
        "another socket",
        |configs| configs.warmroute["listeners"]["ext_proc"] = json!({"address": "127.0.0.1:9002"}),
        &[(Error, "envoy.address"), (Error, "envoy.probe")],
        "address: {socket_address: {address: 127.0.0.1, port_value: 9002}}",
    ),
    standalone(
        "observability mode",
        |configs| configs.main()["observability_mode"] = json!(true),
        &[(Error, "envoy.observability")],
        "`observability_mode: false`",
    ),
    standalone(
        "no request bodies",
        |configs| configs.modes()["request_body_mode"] = json!("NONE"),
        &[(Error, "envoy.request_body")],
        "`request_body_mode: BUFFERED` under `processing_mode`",
    ),
    standalone(
        "streamed request bodies",
        |configs| configs.modes()["request_body_mode"] = json!("STREAMED"),
        &[(Error, "envoy.request_body")],
        "`request_body_mode: BUFFERED` under `processing_mode`",
    ),
    standalone(
        "no request headers",
        |configs| configs.modes()["request_header_mode"] = json!("SKIP"),
        &[(Error, "envoy.request_headers")],
        "`request_header_mode: SEND`",
    ),
    standalone(
        "no response headers",
        |configs| configs.modes()["response_header_mode"] = json!("SKIP"),
        &[(Warning, "envoy.response_headers")],
        "`response_header_mode: SEND`",
    ),
    standalone(
        "no response trailers",
        |configs| configs.modes()["response_trailer_mode"] = json!("SKIP"),
        &[(Error, "envoy.response_trailers")],
        "`response_trailer_mode: SEND`",
    ),
    standalone(
        "streamed response bodies",
        |configs| configs.modes()["response_body_mode"] = json!("STREAMED"),
        &[(Warning, "envoy.response_body")],
        "`response_body_mode: NONE`",
    ),
    standalone(
        "buffered response bodies",
        |configs| configs.modes()["response_body_mode"] = json!("BUFFERED"),
        &[(Error, "envoy.response_body")],
        "`response_body_mode: NONE`",
    ),
    standalone(
        "500 without warmroute",
        |configs| configs.main()["failure_mode_allow"] = json!(false),
        &[(Warning, "envoy.failure_mode")],
        "`failure_mode_allow: true`",
    ),
    standalone(
        "message timeout too short",
        |configs| without(configs.main(), "message_timeout"),
        &[(Error, "envoy.message_timeout")],
        "`message_timeout: 1s`",
    ),
    standalone(
        "maximum message timeout shorter than the queue timeout",
        |configs| {
            without(configs.main(), "max_message_timeout");
            configs.warmroute["queue"] = json!({"prefill_busy_threshold": 8192});
        },
        &[(Error, "envoy.max_message_timeout")],
        "`max_message_timeout: 30.5s`",
    ),
    standalone(
        "maximum message timeout shorter than a long queue timeout",
        |configs| {
            configs.warmroute["queue"] = json!({"prefill_busy_threshold": 8192, "timeout": "2m"})
        },
        &[(Error, "envoy.max_message_timeout")],
        "`max_message_timeout: 120.5s`",
    ),
    standalone(
        "idle timeout shorter than the queue timeout",
        |configs| {
            configs.main()["max_message_timeout"] = json!("1000s");
            configs.warmroute["queue"] = json!({"prefill_busy_threshold": 8192, "timeout": "11m"});
        },
        &[(Error, "envoy.idle_timeout")],
        "`stream_idle_timeout: 1260.5s`",
    ),
    standalone(
        "mode override not allowed",
        |configs| configs.main()["allow_mode_override"] = json!(false),
        &[(Warning, "envoy.mode_override")],
        "`allow_mode_override: true`",
    ),
    standalone(
        "no response attributes",
        |configs| without(configs.main(), "response_attributes"),
        &[(Warning, "envoy.response_attributes")],
        "`response_attributes: [upstream.address, response.flags]`",
    ),
    in_file(
        "gateway-api",
        standalone(
            "full duplex without content length",
            |configs| without(configs.main(), "allow_content_length_header"),
            &[(Warning, "envoy.full_duplex")],
            "`allow_content_length_header: true`",
        ),
    ),
    in_file(
        "gateway-api",
        standalone(
            "full duplex with fail_open",
            |configs| configs.warmroute["gateway"]["failure"] = json!({"mode": "fail_open"}),
            &[(Warning, "envoy.failure_mode")],
            "`gateway: {failure: {mode: fail_closed}}`",
        ),
    ),
];

/// Faults of the first-token probe.
pub(super) const PROBE_FAULTS: &[EnvoyFault] = &[
    standalone(
        "probe after the main filter",
        |configs| configs.filters().swap(0, 1),
        &[(Error, "envoy.probe_order")],
        "move `first_token_probe` before `envoy.filters.http.ext_proc`",
    ),
    standalone(
        "probe that truncates responses on failure",
        |configs| configs.probe()["failure_mode_allow"] = json!(false),
        &[(Warning, "envoy.probe")],
        "`failure_mode_allow: true`",
    ),
    standalone(
        "probe that delays responses",
        |configs| configs.probe()["message_timeout"] = json!("10s"),
        &[(Warning, "envoy.probe")],
        "`message_timeout: 0.3s`",
    ),
    standalone(
        "probe without its identifying metadata",
        |configs| without(&mut configs.probe()["grpc_service"], "initial_metadata"),
        &[(Warning, "envoy.probe")],
        "`initial_metadata: [{key: x-warmroute-filter, value: probe}]`",
    ),
    standalone(
        "missing probe",
        |configs| {
            configs
                .filters()
                .retain(|filter| filter["name"] != "first_token_probe")
        },
        &[(Warning, "envoy.probe")],
        "remove x-warmroute-filter",
    ),
    standalone(
        "probe that does not forward the exchange key",
        |configs| without(configs.probe(), "metadata_options"),
        &[(Warning, "envoy.probe")],
        "`warmroute` into `forwarding_namespaces",
    ),
];
