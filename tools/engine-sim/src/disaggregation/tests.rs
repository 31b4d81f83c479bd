use super::*;

fn side_channel() -> SideChannelAddress {
    SideChannelAddress {
        engine: "e-1".into(),
        host: "127.0.0.1".into(),
        port: 5601,
    }
}

fn leased(name: &str) -> LeasedBlocks {
    LeasedBlocks {
        name: name.into(),
        blocks: vec![3, 1, 2],
        tokens: 40,
    }
}

fn phase(
    protocol: TransferProtocol,
    body: &Value,
    prompts: usize,
    choices: usize,
) -> Result<RequestPhase, String> {
    DisaggregationFields::read(body.to_string().as_bytes())?.phase(protocol, prompts, choices)
}

/// The fields and their order match a response of a real vLLM 0.32.
#[test]
fn transfer_params_match_vllm_and_round_trip() {
    let params = side_channel().transfer_params(&leased("chatcmpl-x-1"), 16);
    let expected = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": [[3, 1, 2]],
        "remote_engine_id": "e-1",
        "remote_request_id": "chatcmpl-x-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 40,
        "remote_blocks_expiry_time": null,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 16
    });
    assert_eq!(params.to_string(), expected.to_string());
    let parsed = phase(
        TransferProtocol::Nixl,
        &json!({"kv_transfer_params": params}),
        1,
        1,
    )
    .unwrap();
    let source = KvSource {
        cached_tokens: Some(16),
        blocks: Some(vec![3, 1, 2]),
        ..side_channel().source(&leased("chatcmpl-x-1"))
    };
    assert_eq!(parsed, RequestPhase::RemotePrefill(source));
    assert_eq!(parsed.remote_cached_tokens(), Some(16));
}

#[test]
fn vllm_params_select_request_phase() {
    let remote_decode = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                      "remote_block_ids": null, "remote_host": null, "remote_port": null});
    for (params, expected) in [
        (remote_decode, RequestPhase::RemoteDecode(None)),
        (json!(null), RequestPhase::Local),
        (json!({}), RequestPhase::Local),
        (
            json!({"do_remote_prefill": false, "unknown": [1]}),
            RequestPhase::Local,
        ),
    ] {
        let body = json!({"kv_transfer_params": params});
        assert_eq!(
            phase(TransferProtocol::Nixl, &body, 1, 1).unwrap(),
            expected,
            "{body}"
        );
    }
    let problem = phase(
        TransferProtocol::Nixl,
        &json!({"kv_transfer_params": {"do_remote_prefill": true}}),
        1,
        1,
    );
    assert!(problem.unwrap_err().contains("remote_"));
}

#[test]
fn disaggregated_params_return_with_other_request_type() {
    let body =
        json!({"disaggregated_params": {"request_type": "context_only", "disagg_request_id": 77}});
    assert_eq!(
        phase(TransferProtocol::Trtllm, &body, 1, 1).unwrap(),
        RequestPhase::RemoteDecode(Some(77))
    );
    let without = json!({"disaggregated_params": {"request_type": "context_only"}});
    assert_eq!(
        phase(TransferProtocol::Trtllm, &without, 1, 1).unwrap(),
        RequestPhase::RemoteDecode(None)
    );
    let disaggregation_fields = DisaggregationFields::read(body.to_string().as_bytes()).unwrap();
    let mut params =
        disaggregation_fields.response_params(&side_channel(), &leased("77"), 1, Some(5));
    assert_eq!(
        (&params["ctx_request_id"], &params["disagg_request_id"]),
        (&json!(77), &json!(77))
    );
    assert_eq!(
        (&params["first_gen_tokens"], &params["ctx_dp_rank"]),
        (&json!([5]), &json!(1))
    );
    params["request_type"] = json!("generation_only");
    let parsed = phase(
        TransferProtocol::Trtllm,
        &json!({"disaggregated_params": params}),
        1,
        1,
    )
    .unwrap();
    assert_eq!(
        parsed,
        RequestPhase::RemotePrefill(KvSource {
            first: Some(5),
            ..side_channel().source(&leased("77"))
        })
    );
}

/// Returns the parameters that a context server returned for a generation server, and their phase.
fn generation_params() -> Value {
    let body =
        json!({"disaggregated_params": {"request_type": "context_only", "disagg_request_id": 77}});
    let fields = DisaggregationFields::read(body.to_string().as_bytes()).unwrap();
    let mut params = fields.response_params(&side_channel(), &leased("77"), 1, Some(5));
    params["request_type"] = json!("generation_only");
    params
}

#[test]
fn disaggregated_params_name_the_lease() {
    let mut params = generation_params();
    for (disagg, ctx, expected) in [
        (json!(null), json!(12), "12"),
        (json!(9), json!(12), "9"),
        (json!(9), json!(null), "9"),
    ] {
        params["disagg_request_id"] = disagg;
        params["ctx_request_id"] = ctx;
        let parsed = phase(
            TransferProtocol::Trtllm,
            &json!({"disaggregated_params": params}),
            1,
            1,
        )
        .unwrap();
        assert_eq!(
            parsed,
            RequestPhase::RemotePrefill(KvSource {
                first: Some(5),
                ..side_channel().source(&leased(expected))
            })
        );
    }
    params["disagg_request_id"] = json!(null);
    params["ctx_request_id"] = json!(12);
    for missing in ["ctx_request_id", "encoded_opaque_state"] {
        let mut params = params.clone();
        params[missing] = json!(null);
        let problem = phase(
            TransferProtocol::Trtllm,
            &json!({"disaggregated_params": params}),
            1,
            1,
        )
        .unwrap_err();
        assert!(problem.contains(missing), "{problem}");
    }
    let unknown = json!({"disaggregated_params": {"request_type": "both"}});
    assert!(phase(TransferProtocol::Trtllm, &unknown, 1, 1).is_err());
}

#[test]
fn each_prompt_needs_exactly_one_room() {
    for (room, prompts, choices, expected) in [
        (json!(7), 1, 1, Ok(vec![7])),
        (json!(7), 3, 1, Ok(vec![7, 8, 9])),
        (json!(7), 1, 2, Err(())),
        (json!([5, 9]), 2, 2, Err(())),
        (json!([5, 9]), 2, 1, Ok(vec![5, 9])),
        (json!([5, 9]), 1, 1, Err(())),
        (json!(i64::MAX), 1, 1, Ok(vec![i64::MAX as u64])),
        (json!(null), 1, 1, Err(())),
    ] {
        let body = json!({"bootstrap_host": "p", "bootstrap_port": 9, "bootstrap_room": room});
        let prefill =
            phase(TransferProtocol::SglangPrefill, &body, prompts, choices).map_err(|_| ());
        assert_eq!(
            prefill,
            expected.clone().map(RequestPhase::BootstrapPrefill),
            "{body}"
        );
        let decode = phase(TransferProtocol::SglangDecode, &body, prompts, choices).map_err(|_| ());
        assert_eq!(
            decode,
            expected.map(|rooms| RequestPhase::BootstrapDecode("p:9".into(), rooms)),
            "{body}"
        );
    }
    let lists = json!({"bootstrap_host": ["p", "p"], "bootstrap_port": [null, null], "bootstrap_room": [1, 2]});
    assert_eq!(
        phase(TransferProtocol::SglangDecode, &lists, 2, 1).unwrap(),
        RequestPhase::BootstrapDecode("p:8998".into(), vec![1, 2])
    );
    for host in ["::1", "[::1]"] {
        let body = json!({"bootstrap_host": host, "bootstrap_port": 9, "bootstrap_room": 1});
        assert_eq!(
            phase(TransferProtocol::SglangDecode, &body, 1, 1).unwrap(),
            RequestPhase::BootstrapDecode("[::1]:9".into(), vec![1])
        );
    }
    assert!(
        phase(
            TransferProtocol::SglangDecode,
            &json!({"bootstrap_room": 1}),
            1,
            1
        )
        .is_err()
    );
}

#[test]
fn abort_ids_and_ranks_are_read_from_body() {
    for (body, abort_ids, rank) in [
        (json!({}), vec![], None),
        (
            json!({"rid": "a", "data_parallel_rank": 1}),
            vec!["a"],
            Some(1),
        ),
        (
            json!({"rid": ["a", "b"], "routed_dp_rank": 2, "data_parallel_rank": 1}),
            vec!["a", "b"],
            Some(2),
        ),
        (json!({"rid": "a", "prompt": [1, 2, 3]}), vec!["a"], None),
        (
            json!({"rid": "a", "prompt": ["x", "y"]}),
            vec!["a_0", "a_1"],
            None,
        ),
        (json!({"rid": "a", "prompt": [[1, 2]]}), vec!["a_0"], None),
    ] {
        let disaggregation_fields =
            DisaggregationFields::read(body.to_string().as_bytes()).unwrap();
        assert_eq!(
            (
                disaggregation_fields.abort_ids(),
                disaggregation_fields.rank()
            ),
            (abort_ids.into_iter().map(str::to_owned).collect(), rank),
            "{body}"
        );
    }
}
