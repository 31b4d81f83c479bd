//! Clients that say themselves who is to get a copy of their request. Measured with Envoy: where nobody stops it, a forged
//! pair of headers has it sent to any address that the client likes. Two things stop it, and each has to do so alone: Envoy's
//! removal of the headers before all filters, and warmroute.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::bed::{Answer, Bed, SOON, chat, engine, engine_for, essay, patient, stream};
use crate::mirror::{self, PREFILL};
use crate::support::ports::until;

const CLUSTER: &str = "x-prefill-cluster";
const DESTINATION: &str = "x-prefill-destination";

/// A cluster that believes the header, as other gateways have it.
const ANYWHERE: &str = "  - name: anywhere
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 1s
    original_dst_lb_config: {use_http_header: true, http_header_name: x-prefill-destination}
";

/// What becomes of a shipped file.
type Envoy = fn(&str) -> String;

/// The shipped file with such a cluster.
fn with_anywhere(shipped: &str) -> String {
    let clusters = "  clusters:\n";
    assert_eq!(shipped.matches(clusters).count(), 1);
    patient(shipped).replace(clusters, &format!("{clusters}{ANYWHERE}"))
}

/// The same without the removal, so that warmroute is alone with the task.
fn unstripped(shipped: &str) -> String {
    let mut config = with_anywhere(shipped);
    for name in [CLUSTER, DESTINATION] {
        let line = format!("              - remove: {name}\n");
        assert_eq!(config.matches(&line).count(), 1, "{name}");
        config = config.replace(&line, "");
    }
    config
}

/// Another configuration in place of the shipped one.
type Patch = fn(&str) -> String;

/// An Envoy that chooses a decode worker without warmroute. The shipped one answers 503.
fn choosing_alone(config: &str) -> String {
    let nobody = "fallback_policy: NO_FALLBACK\n                    default_subset:";
    assert_eq!(config.matches(nobody).count(), 1);
    config.replace(nobody, &nobody.replace("NO_FALLBACK", "DEFAULT_SUBSET"))
}

/// Somebody who has no business with any request, and counts who comes.
struct Outsider {
    address: String,
    came: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Outsider {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, came) = (
            listener.local_addr().unwrap().to_string(),
            Arc::new(AtomicUsize::new(0)),
        );
        let counter = came.clone();
        let task = tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                counter.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self {
            address,
            came,
            task,
        }
    }

    fn came(&self) -> usize {
        self.came.load(Ordering::SeqCst)
    }
}

impl Drop for Outsider {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn ask(bed: &Bed, body: &Value, forged: [Option<&str>; 2]) -> Answer {
    let names = [CLUSTER, DESTINATION].into_iter().zip(forged);
    let set = names.filter_map(|(name, value)| Some((name, value?)));
    Answer::of(set.fold(bed.post(body), |request, (name, value)| {
        request.header(name, value)
    }))
    .await
}

/// Forged pairs: towards the outsider, towards an engine that was not chosen, and half of one.
fn forgeries<'a>(outsider: &'a Outsider, engine: &'a str) -> [[Option<&'a str>; 2]; 5] {
    [
        [Some("anywhere"), Some(&outsider.address)],
        [Some("workers"), Some(engine)],
        [Some("prefill"), Some(engine)],
        [Some("anywhere"), None],
        [None, Some(&outsider.address)],
    ]
}

/// How many generations engines have been asked for.
async fn asked(bed: &Bed) -> f64 {
    bed.engines("vllm:request_success_total").await
}

/// Workers that meet: the copy goes to whom warmroute chose.
async fn with_prefill_workers(envoy: Envoy) {
    let (bed, outsider) = (
        mirror::start_behind("20", json!({}), envoy).await,
        Outsider::start().await,
    );
    let engine = bed.engine(PREFILL[0]).address.to_string();
    for (topic, forged) in forgeries(&outsider, &engine).into_iter().enumerate() {
        for body in [chat(&essay(topic)), stream(&essay(topic + 100), 4)] {
            let before = (
                asked(&bed).await,
                bed.engines("engine_sim:rooms_met_total").await,
            );
            let answer = ask(&bed, &body, forged).await;
            assert_eq!(answer.status, 200, "{forged:?}: {answer:?}");
            mirror::all_met(&bed).await;
            let after = (
                asked(&bed).await,
                bed.engines("engine_sim:rooms_met_total").await,
            );
            assert_eq!(
                after,
                (before.0 + 2.0, before.1 + 2.0),
                "one prefill and one decode: {forged:?}"
            );
        }
    }
    assert_eq!(
        outsider.came(),
        0,
        "somebody got a copy whom nobody had chosen"
    );
}

/// Workers that do both phases: there is no copy.
async fn without_prefill_workers(envoy: Envoy) {
    let specs = [engine(21), engine(22)];
    let bed = Bed::behind_file("disaggregated-mirror", &specs, json!({}), envoy).await;
    let outsider = Outsider::start().await;
    let engine = bed.engine(22).address.to_string();
    for (topic, forged) in forgeries(&outsider, &engine).into_iter().enumerate() {
        let before = asked(&bed).await;
        let answer = ask(&bed, &chat(&essay(topic)), forged).await;
        assert_eq!(answer.status, 200, "{forged:?}: {answer:?}");
        assert!(until(SOON, async || bed.idle().await).await);
        assert_eq!(
            asked(&bed).await,
            before + 1.0,
            "nobody but who was chosen: {forged:?}"
        );
    }
    assert_eq!(
        outsider.came(),
        0,
        "somebody got a copy whom nobody had chosen"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_cannot_say_who_gets_the_copy_where_workers_meet() {
    with_prefill_workers(with_anywhere).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_where_warmroute_alone_has_to_see_to_it() {
    with_prefill_workers(unstripped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_cannot_have_a_copy_made_where_there_is_none() {
    without_prefill_workers(with_anywhere).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_where_warmroute_alone_has_to_see_to_that() {
    without_prefill_workers(unstripped).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_warmroute_envoy_alone_sees_to_it_and_without_both_the_outsider_gets_the_request() {
    let envoys: [(Patch, u16, bool); 3] = [
        (unstripped, 503, false),
        (
            |shipped| choosing_alone(&with_anywhere(shipped)),
            200,
            false,
        ),
        (|shipped| choosing_alone(&unstripped(shipped)), 200, true),
    ];
    for (envoy, status, reached) in envoys {
        let specs = [engine_for("decode", 21), engine_for("decode", 22)];
        let mut bed = Bed::behind_file("disaggregated-mirror", &specs, json!({}), envoy).await;
        let outsider = Outsider::start().await;
        bed.stack.kill9_router();
        let answer = ask(
            &bed,
            &chat(&essay(1)),
            [Some("anywhere"), Some(&outsider.address)],
        )
        .await;
        assert_eq!(answer.status, status, "{answer:?}");
        if reached {
            assert!(
                until(SOON, async || outsider.came() > 0).await,
                "this shows that the tests above can fail"
            );
        } else {
            let copies = async || {
                let stats = bed.http.get(
                    bed.stack
                        .standalone()
                        .admin_url("/stats?filter=cluster.anywhere.upstream_cx_total"),
                );
                stats.send().await.unwrap().text().await.unwrap()
            };
            assert!(
                copies().await.contains("upstream_cx_total: 0"),
                "{}",
                copies().await
            );
            assert_eq!(outsider.came(), 0);
        }
    }
}
