//! Tenants, adapters and objectives.

use super::*;

fn preprocess(
    clients: &ClientsConfig,
    tenant: Option<&'static str>,
    model: &str,
    nvext: &str,
) -> PreprocessedRequest {
    let body = format!(r#"{{"model":"{model}","prompt":"x","cache_salt":"own","nvext":{nvext}}}"#);
    let headers = move |name: &str| {
        (name == "x-tenant-id")
            .then_some(tenant)
            .flatten()
            .map(Into::into)
    };
    preprocessor_without_tokenizer(clients.clone()).preprocess_blocking(
        None,
        "/v1/completions",
        &headers,
        body.as_bytes(),
    )
}

fn local_hashes_of(salt: &CacheSalt) -> Vec<warmroute_core::block::LocalHash> {
    warmroute_core::block::hash::local_hashes(
        &[1, 2, 3, 4, 5, 6, 7, 8],
        BlockSize::new(4).unwrap(),
        salt,
        BlockWindows::Plain,
        &[],
    )
}

#[test]
fn adapter_and_tenant_salt_the_hashes() {
    let data = r#"{"token_data":[1,2,3,4,5,6,7,8,9]}"#;
    let salted = r#"{"token_data":[1,2,3,4,5,6,7,8,9],"cache_salt":"inner"}"#;
    let trusted = ClientsConfig {
        trusted: true,
        tenant_header: Some("x-tenant-id".into()),
        ..ClientsConfig::default()
    };
    let salt = |lora: Option<&str>, cache: &str| CacheSalt {
        lora: lora.map(Into::into),
        cache: Some(cache.into()),
    };
    let cases = [
        ("base", None, data, salt(None, "own")),
        ("tuned", None, data, salt(Some("tuned"), "own")),
        ("alias", None, salted, salt(None, "inner")),
        ("base", Some(" t1 "), salted, salt(None, "t1")),
        ("base", Some("  "), salted, salt(None, "inner")),
    ];
    for (model, tenant, nvext, salt) in cases {
        let preprocessed = preprocess(&trusted, tenant, model, nvext);
        assert_eq!(
            preprocessed.route_request.model,
            Some("base".into()),
            "{model}"
        );
        let [blocks] = preprocessed.route_request.prompt.blocks() else {
            panic!("{model} {nvext}: {:?}", preprocessed.route_request.prompt)
        };
        assert_eq!(
            blocks.locals(),
            local_hashes_of(&salt),
            "{model} {tenant:?} {nvext}"
        );
        assert_eq!(
            preprocessed.route_request.constraints.adapter.as_deref(),
            (model == "tuned").then_some("tuned")
        );
    }
    let untrusted = preprocess(&ClientsConfig::default(), Some("t1"), "base", data);
    assert!(matches!(
        untrusted.route_request.prompt,
        RoutePrompt::Estimated {
            reason: Reason::NoTokenizer,
            ..
        }
    ));
}

#[test]
fn front_ends_make_token_data_the_prompt() {
    let clients = ClientsConfig::default();
    let preprocessor = RequestPreprocessor::new(PreprocessorParts {
        nvext: NvExtScope::new(&clients, true),
        ..parts_without_tokenizer(clients)
    });
    let body = r#"{"model":"base","messages":[{"role":"user","content":"hi"}],"nvext":{
        "token_data":[1,2,3,4,5,6,7,8,9],"cache_salt":"inner","backend_instance_id":7,
        "agent_hints":{"priority":5},"session_control":{"session_id":"s","action":"open"},
        "annotations":["query_instance_id:"]}}"#;
    let preprocessed =
        preprocessor.preprocess_blocking(None, "/v1/chat/completions", &|_| None, body.as_bytes());
    let request = &preprocessed.route_request;
    let salt = CacheSalt {
        cache: Some("inner".into()),
        ..CacheSalt::default()
    };
    let [blocks] = request.prompt.blocks() else {
        panic!("{:?}", request.prompt)
    };
    assert_eq!(blocks.locals(), local_hashes_of(&salt));
    // Hints of the same client do not count.
    assert_eq!(request.constraints, Default::default());
    assert_eq!(request.priority, Default::default());
    assert!(!preprocessed.is_query && preprocessed.session.is_none());
}

const CURRENT_HEADER: &str = "x-llm-d-inference-objective";
const LEGACY_HEADER: &str = "x-gateway-inference-objective";
const STRICT_HEADER: &str = "x-dynamo-request-strict-priority";
const PATH: &str = "/v1/completions";
const PATH_OF_POOL_Q: &str = "/q/v1/completions";

/// Returns a preprocessor for a cluster with objectives in two pools.
fn preprocessor_with_objectives(clients: ClientsConfig) -> Arc<RequestPreprocessor> {
    let objectives = [("p", "gold", 5), ("q", "gold", -9), ("p", "none", 0)];
    let cluster = ClusterRules::new(
        objectives.map(|(pool, name, priority)| (pool.into(), name.to_owned(), priority)),
        [],
    );
    let pool_routes = r#"{"rules": [{"pool": "q", "paths": ["/q"]}]}"#;
    let limits = EncodeLimits {
        inline: 4096,
        queue: 256,
        deadline: Duration::from_secs(30),
    };
    RequestPreprocessor::new(PreprocessorParts {
        pool_routes: serde_json::from_str(pool_routes).unwrap(),
        cluster: Arc::new(arc_swap::ArcSwap::from_pointee(cluster)),
        ..preprocessor_parts(ModelRegistry::default(), clients, limits)
    })
}

/// Returns the strict priority of a request, and its pool.
fn priority_and_pool(
    clients: &ClientsConfig,
    path: &str,
    headers: &[(&str, &str)],
) -> (i64, Option<String>) {
    let preprocessor = preprocessor_with_objectives(clients.clone());
    let find = |name: &str| {
        headers
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).into())
    };
    let pool = preprocessor.pool_of(path, &find);
    let body = br#"{"model":"m","prompt":"x"}"#;
    let request = preprocessor
        .preprocess_blocking(pool, path, &find, body)
        .route_request;
    let pool = request.constraints.pool.as_deref().map(str::to_owned);
    (request.priority.strict, pool)
}

#[test]
fn objective_priority_depends_on_pool() {
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], (i64, Option<&'a str>));
    let cases: [Case<'_>; 6] = [
        (PATH, &[], (0, None)),
        (PATH, &[(CURRENT_HEADER, " gold ")], (5, None)),
        (PATH, &[(LEGACY_HEADER, "gold")], (5, None)),
        (
            PATH,
            &[(LEGACY_HEADER, "gold"), (CURRENT_HEADER, "unknown")],
            (0, None),
        ),
        (PATH_OF_POOL_Q, &[(CURRENT_HEADER, "gold")], (-9, Some("q"))),
        (PATH_OF_POOL_Q, &[(CURRENT_HEADER, "none")], (0, Some("q"))),
    ];
    for (path, headers, (priority, pool)) in cases {
        assert_eq!(
            priority_and_pool(&ClientsConfig::default(), path, headers),
            (priority, pool.map(str::to_owned)),
            "{path} {headers:?}"
        );
    }
}

#[test]
fn strict_priority_of_trusted_client_precedes_objective() {
    let untrusted = ClientsConfig::default();
    let trusted = ClientsConfig {
        trusted: true,
        ..ClientsConfig::default()
    };
    let without_objectives = ClientsConfig {
        objective_headers: vec![],
        ..ClientsConfig::default()
    };
    let gold = (CURRENT_HEADER, "gold");
    let strict = (STRICT_HEADER, "7");
    for (clients, headers, priority) in [
        (&untrusted, vec![strict], 0),
        (&trusted, vec![strict, gold], 7),
        (&trusted, vec![gold], 5),
        (&without_objectives, vec![gold], 0),
    ] {
        assert_eq!(
            priority_and_pool(clients, PATH, &headers),
            (priority, None),
            "{headers:?}"
        );
    }
}
