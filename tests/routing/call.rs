//! Prefills that warmroute has done itself by another worker, and hands over to whoever decodes.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::{StreamExt as _, stream as streams};
use serde_json::{Value, json};
use warmroute::engine_client::MetricsPage;

use crate::bed::{Answer, Bed, SOON, chat, engine_for, essay, stream, text};
use crate::support::ports::until;
use crate::support::stack::{BLOCK_SIZE, EngineSpec, MODEL, model_file};

const PREFILL: [u64; 2] = [11, 12];
const DECODE: [u64; 2] = [21, 22];

fn pools(args: &[&str]) -> Vec<EngineSpec> {
    let pool = |role, ids: [u64; 2]| ids.map(|id| engine_for(role, id).with(args));
    pool("prefill", PREFILL).into_iter().chain(pool("decode", DECODE)).collect()
}

fn calling(prefill: Value, more: Value) -> Value {
    let mut config = json!({"models": [{
        "name": MODEL,
        "tokenizer": model_file("tokenizer.json.gz"),
        "tokenizer_config": model_file("tokenizer_config.json"),
        "block_size": BLOCK_SIZE,
        "prefill": prefill,
    }]});
    config["models"][0]["prefill"]["by"] = json!("call");
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

const NIXL: [&str; 2] = ["--kv-connector", "nixl"];

impl Bed {
    /// A counter or gauge of an engine, over all engines.
    async fn engines(&self, name: &str) -> f64 {
        let mut sum = 0.0;
        for engine in &self.stack.engines {
            let Ok(page) = self.http.get(engine.url("/metrics")).send().await else { continue };
            sum += MetricsPage::read(&page.text().await.unwrap()).sum(name).unwrap_or_else(|| panic!("no {name}"));
        }
        sum
    }

    /// Waits until nothing is in flight, and insists that no engine keeps anything for a request that is over.
    async fn nothing_left(&self) {
        self.quiet().await;
        assert_eq!(self.engines("engine_sim:kv_leases").await, 0.0, "leases are left over");
        assert_eq!(self.engines("engine_sim:kv_mismatches_total").await, 0.0, "blocks of other requests were taken");
    }
}

/// What an answer says, whoever gave it.
fn words(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    let choice = &answer.json()["choices"][0];
    choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_workers_do_their_part_and_answers_are_as_if_one_had_done_it_all() {
    let bed = Bed::start(&pools(&NIXL), calling(json!({}), json!({}))).await;
    let bodies = (0..60).map(|topic| match topic % 3 {
        0 => chat(&essay(topic)),
        1 => text(&essay(topic)),
        _ => stream(&essay(topic), 4),
    });
    let answers: Vec<(Value, Answer)> = streams::iter(bodies)
        .map(async |body| (body.clone(), bed.ask(&body).await))
        .buffer_unordered(8)
        .collect()
        .await;
    let (mut prefills, mut decodes) = (BTreeSet::new(), BTreeSet::new());
    for (body, answer) in &answers {
        decodes.insert(answer.engine());
        prefills.insert(answer.header("x-prefill-instance-id").parse::<u64>().expect("a prefill worker"));
        if body["stream"].is_null() {
            // The decode engine computes it anew, because this request takes nothing over.
            let alone = bed.http.post(bed.engine(21).url(path(body))).json(body);
            assert_eq!(words(answer), words(&Answer::of(alone).await), "{body}");
        }
    }
    assert_eq!((prefills, decodes), (PREFILL.into(), DECODE.into()));
    assert_eq!(bed.engines("engine_sim:kv_transfers_total").await, 60.0);
    let page = bed.metrics().await;
    assert_eq!(page.sum("prefill_calls_total", &[("outcome", "done")]), 60.0);
    assert_eq!(page.sum("phases_total", &[("phases", "remote_prefill")]), 60.0);
    bed.nothing_left().await;
}

fn path(body: &Value) -> &'static str {
    if body["prompt"].is_null() { "/v1/chat/completions" } else { "/v1/completions" }
}
