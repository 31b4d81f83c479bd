use super::*;

fn door() -> Door {
    Door {
        engine: "e-1".into(),
        host: "127.0.0.1".into(),
        port: 5601,
    }
}

fn lent(name: &str) -> Lent {
    Lent {
        name: name.into(),
        blocks: vec![3, 1, 2],
        tokens: 40,
    }
}

fn hand(protocol: Protocol, body: &Value, count: (usize, usize)) -> Result<Hand, String> {
    Wishes::read(body.to_string().as_bytes())?.hand(protocol, count)
}

/// The fields and their order are those a real vLLM 0.32 answered with.
#[test]
fn transfer_params_read_like_vllms_and_are_understood_again() {
    let params = door().transfer_params(&lent("chatcmpl-x-1"), 16);
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
    let understood = hand(
        Protocol::Nixl,
        &json!({"kv_transfer_params": params}),
        (1, 1),
    )
    .unwrap();
    let source = Source {
        cached: Some(16),
        blocks: Some(vec![3, 1, 2]),
        ..door().source(&lent("chatcmpl-x-1"))
    };
    assert_eq!(understood, Hand::Fetch(source));
    assert_eq!(understood.cached_elsewhere(), Some(16));
}

#[test]
fn a_request_of_vllms_kind_lends_fetches_or_does_neither() {
    let asks = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                      "remote_block_ids": null, "remote_host": null, "remote_port": null});
    for (params, expected) in [
        (asks, Hand::Lend(None)),
        (json!(null), Hand::Whole),
        (json!({}), Hand::Whole),
        (
            json!({"do_remote_prefill": false, "unknown": [1]}),
            Hand::Whole,
        ),
    ] {
        let body = json!({"kv_transfer_params": params});
        assert_eq!(
            hand(Protocol::Nixl, &body, (1, 1)).unwrap(),
            expected,
            "{body}"
        );
    }
    let problem = hand(
        Protocol::Nixl,
        &json!({"kv_transfer_params": {"do_remote_prefill": true}}),
        (1, 1),
    );
    assert!(problem.unwrap_err().contains("remote_"));
}

#[test]
fn disaggregated_params_go_back_with_another_request_type() {
    let body =
        json!({"disaggregated_params": {"request_type": "context_only", "disagg_request_id": 77}});
    assert_eq!(
        hand(Protocol::Trtllm, &body, (1, 1)).unwrap(),
        Hand::Lend(Some(77))
    );
    let without = json!({"disaggregated_params": {"request_type": "context_only"}});
    assert_eq!(
        hand(Protocol::Trtllm, &without, (1, 1)).unwrap(),
        Hand::Lend(None)
    );
    let wishes = Wishes::read(body.to_string().as_bytes()).unwrap();
    let mut params = wishes.disaggregated(&door(), &lent("77"), (1, Some(5)));
    assert_eq!(
        (&params["ctx_request_id"], &params["disagg_request_id"]),
        (&json!(77), &json!(77))
    );
    assert_eq!(
        (&params["first_gen_tokens"], &params["ctx_dp_rank"]),
        (&json!([5]), &json!(1))
    );
    params["request_type"] = json!("generation_only");
    let understood = hand(
        Protocol::Trtllm,
        &json!({"disaggregated_params": params}),
        (1, 1),
    )
    .unwrap();
    assert_eq!(
        understood,
        Hand::Fetch(Source {
            first: Some(5),
            ..door().source(&lent("77"))
        })
    );
    for (disagg, ctx, expected) in [
        (json!(null), json!(12), "12"),
        (json!(9), json!(12), "9"),
        (json!(9), json!(null), "9"),
    ] {
        params["disagg_request_id"] = disagg;
        params["ctx_request_id"] = ctx;
        let understood = hand(
            Protocol::Trtllm,
            &json!({"disaggregated_params": params}),
            (1, 1),
        )
        .unwrap();
        assert_eq!(
            understood,
            Hand::Fetch(Source {
                first: Some(5),
                ..door().source(&lent(expected))
            })
        );
    }
    params["disagg_request_id"] = json!(null);
    params["ctx_request_id"] = json!(12);
    for missing in ["ctx_request_id", "encoded_opaque_state"] {
        let mut params = params.clone();
        params[missing] = json!(null);
        let problem = hand(
            Protocol::Trtllm,
            &json!({"disaggregated_params": params}),
            (1, 1),
        )
        .unwrap_err();
        assert!(problem.contains(missing), "{problem}");
    }
    let unknown = json!({"disaggregated_params": {"request_type": "both"}});
    assert!(hand(Protocol::Trtllm, &unknown, (1, 1)).is_err());
}

#[test]
fn every_prompt_has_a_room_and_a_request_without_one_or_with_several_answers_is_refused() {
    for (room, count, expected) in [
        (json!(7), (1, 1), Ok(vec![7])),
        (json!(7), (3, 1), Ok(vec![7, 8, 9])),
        (json!(7), (1, 2), Err(())),
        (json!([5, 9]), (2, 2), Err(())),
        (json!([5, 9]), (2, 1), Ok(vec![5, 9])),
        (json!([5, 9]), (1, 1), Err(())),
        (json!(i64::MAX), (1, 1), Ok(vec![i64::MAX as u64])),
        (json!(null), (1, 1), Err(())),
    ] {
        let body = json!({"bootstrap_host": "p", "bootstrap_port": 9, "bootstrap_room": room});
        let prefill = hand(Protocol::SglangPrefill, &body, count).map_err(|_| ());
        assert_eq!(prefill, expected.clone().map(Hand::Host), "{body}");
        let decode = hand(Protocol::SglangDecode, &body, count).map_err(|_| ());
        assert_eq!(
            decode,
            expected.map(|rooms| Hand::Visit("p:9".into(), rooms)),
            "{body}"
        );
    }
    let lists = json!({"bootstrap_host": ["p", "p"], "bootstrap_port": [null, null], "bootstrap_room": [1, 2]});
    assert_eq!(
        hand(Protocol::SglangDecode, &lists, (2, 1)).unwrap(),
        Hand::Visit("p:8998".into(), vec![1, 2])
    );
    for host in ["::1", "[::1]"] {
        let body = json!({"bootstrap_host": host, "bootstrap_port": 9, "bootstrap_room": 1});
        assert_eq!(
            hand(Protocol::SglangDecode, &body, (1, 1)).unwrap(),
            Hand::Visit("[::1]:9".into(), vec![1])
        );
    }
    assert!(
        hand(
            Protocol::SglangDecode,
            &json!({"bootstrap_room": 1}),
            (1, 1)
        )
        .is_err()
    );
}

#[test]
fn names_and_ranks_are_read_from_the_body() {
    for (body, names, rank) in [
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
        let wishes = Wishes::read(body.to_string().as_bytes()).unwrap();
        assert_eq!(
            (wishes.names(), wishes.rank()),
            (names.into_iter().map(str::to_owned).collect(), rank),
            "{body}"
        );
    }
}
