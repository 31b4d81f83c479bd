//! Two pools behind one warmroute, each with its own Service. `routing.pool_routes.authorities`
//! keeps requests in the pool of their route.

use serde_json::{Value, json};

use crate::gateways::bed::GatewayTestbed;
use crate::gateways::generated::{
    ENVOY_AI_GATEWAY, ENVOY_GATEWAY, GatewayFixture, GeneratedConfig, ISTIO, ISTIO_AS_GENERATED,
    ISTIO_BUFFERED,
};
use crate::support::deployment::{RoutedAnswer, chat, essay, fast};
use crate::support::manifest_set::ManifestSet;

const POOLS: [&str; 2] = ["vllm-qwen", "vllm-qwen-batch"];
const PROMPTS: usize = 12;

/// Copies a resource and renames it for the second pool.
fn second(resource: &Value) -> Value {
    let mut text = resource.to_string();
    for (first, second) in [
        ("warmroute", "warmroute-batch"),
        ("vllm-qwen", "vllm-qwen-batch"),
        ("/qwen/", "/qwen-batch/"),
        ("inference.qwen.", "inference.qwen-batch."),
    ] {
        text = text.replace(first, second);
    }
    serde_json::from_str(&text).unwrap()
}

/// Returns the name of a cluster in the second pool.
fn second_name(name: &str) -> String {
    second(&json!(name)).as_str().unwrap().to_owned()
}

/// Returns the configuration with a second pool, whose route matches a header. Istio has one
/// ext_proc filter with an override per route. The other gateways have one filter per pool: Envoy
/// AI Gateway disables and Envoy Gateway enables it per route.
fn with_second_pool(gateway: GatewayFixture) -> GeneratedConfig {
    let mut config = gateway.shipped().patient();
    for name in [gateway.picker, gateway.workers] {
        let copy = second(config.cluster(name));
        config.0["static_resources"]["clusters"]
            .as_array_mut()
            .unwrap()
            .push(copy);
    }
    let mut route = second(config.routes().next().unwrap());
    route["match"]["headers"] = json!([{"name": "x-tier", "string_match": {"exact": "batch"}}]);
    let filters = config.manager()["http_filters"].as_array_mut().unwrap();
    let name = filters[0]["name"].as_str().unwrap().to_owned();
    if name != "envoy.filters.http.ext_proc" {
        let copy = second(&filters[0]);
        filters.insert(1, copy);
    }
    if gateway.file == ENVOY_AI_GATEWAY.file {
        let disabled = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "disabled": true,
        });
        route["typed_per_filter_config"][&name] = disabled.clone();
        config.routes().for_each(|first| {
            first["typed_per_filter_config"][second_name(&name)] = disabled.clone()
        });
    }
    let routes = config.manager()["route_config"]["virtual_hosts"][0]["routes"]
        .as_array_mut()
        .unwrap();
    routes.insert(0, route);
    config
}

/// Sends a prompt to one pool. Returns the pool that served it.
async fn serving_pool(bed: &GatewayTestbed, prompt: &str, pool: usize) -> (usize, RoutedAnswer) {
    let mut request = bed.request("/v1/chat/completions", &chat(prompt));
    if pool == 1 {
        request = request.header("x-tier", "batch");
    }
    let answered = RoutedAnswer::send(request).await;
    (usize::from(answered.engine() > 2), answered)
}

/// Sends each prompt to both pools. Counts the requests that another pool, or another worker than
/// the chosen one, served.
async fn served_by_another(bed: &GatewayTestbed) -> usize {
    let mut strays = 0;
    for topic in 0..PROMPTS {
        for pool in [0, 1] {
            let (serving, answered) = serving_pool(bed, &essay(topic), pool).await;
            let received = answered.header("x-received-worker-instance-id");
            let moved = answered.engine().to_string() != received;
            strays += usize::from(serving != pool || moved);
        }
    }
    strays
}

async fn assert_pools_are_separate(gateway: GatewayFixture) {
    let specs = [1_u64, 2, 3, 4].map(|id| {
        let pool = POOLS[usize::from(id > 2)];
        fast(id).with_worker_fields(json!({"taints": [format!("pool={pool}")]}))
    });
    let mut bed = GatewayTestbed::engines(gateway, &specs).await;
    let set = ManifestSet::of_overlay("two-pools");
    let shipped: Value = serde_saphyr::from_str(set.text("warmroute", "warmroute.yaml")).unwrap();
    let mut warmroute = bed.warmroute();
    warmroute["routing"]["pool_routes"] = shipped["routing"]["pool_routes"].clone();
    bed.start_router(&warmroute).await.unwrap();
    let mut config = with_second_pool(gateway);
    bed.place_second_pool(
        &mut config,
        &second_name(gateway.picker),
        &second_name(gateway.workers),
    );
    bed.start_envoy(config).await;
    assert_eq!(served_by_another(&bed).await, 0);
    bed.idle().await;
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("served_endpoint_mismatches_total", &[]),
        0.0,
        "{}",
        page.text()
    );
    // The same requests without `routing.pool_routes`.
    bed.start_warmroute().await;
    assert_ne!(served_by_another(&bed).await, 0);
}

long_tests! {
    istio_confines_requests_to_their_pool: assert_pools_are_separate(ISTIO_AS_GENERATED),
    istio_with_authority_confines_requests_to_their_pool: assert_pools_are_separate(ISTIO),
    istio_buffered_confines_requests_to_their_pool: assert_pools_are_separate(ISTIO_BUFFERED),
    envoy_ai_gateway_confines_requests_to_their_pool: assert_pools_are_separate(ENVOY_AI_GATEWAY),
    envoy_gateway_confines_requests_to_their_pool: assert_pools_are_separate(ENVOY_GATEWAY),
}
