//! CPU time of the poller with pages of a real engine, in the long form of the tests:
//! `WARMROUTE_LONG_TESTS=1 cargo test --release -p warmroute-server poller_cost -- --nocapture`.

use std::net::SocketAddr;
use std::sync::mpsc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use warmroute_property_tests::is_long_form;

use super::*;

const PAGE: &str = include_str!("../../../../../../tests/data/engines/metrics-vllm.txt");
const WARM_UP: Duration = Duration::from_secs(7);
const MEASURED: Duration = Duration::from_secs(20);
/// Maximum share of a core at 100 workers, in a release build.
const MAX_CORE_SHARE: f64 = 0.05;

/// Measured cost of a fleet.
#[derive(Debug)]
struct PollerCost {
    core_share: f64,
    scrapes_per_second: f64,
}

async fn serve_pages(mut stream: TcpStream) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: {}\r\n\r\n",
        PAGE.len()
    );
    let response = head + PAGE;
    let mut request = [0; 4096];
    // Requests have no body and fit one segment.
    while stream.read(&mut request).await? > 0 {
        stream.write_all(response.as_bytes()).await?;
    }
    Ok(())
}

/// Starts engines on a thread of their own, so that their cost is not measured.
fn start_engines(count: usize) -> Vec<WorkerEndpoint> {
    let (endpoints_tx, endpoints_rx) = mpsc::channel::<Vec<SocketAddr>>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut endpoints = Vec::new();
            for _ in 0..count {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                endpoints.push(listener.local_addr().unwrap());
                tokio::spawn(async move {
                    while let Ok((stream, _)) = listener.accept().await {
                        tokio::spawn(serve_pages(stream));
                    }
                });
            }
            endpoints_tx.send(endpoints).unwrap();
            future::pending::<()>().await;
        });
    });
    let endpoints = endpoints_rx.recv().unwrap();
    endpoints.into_iter().map(WorkerEndpoint).collect()
}

/// Returns the CPU time of this thread.
fn thread_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanos = text.split_whitespace().next().unwrap();
    Duration::from_nanos(nanos.parse().unwrap())
}

fn measure(workers: usize) -> PollerCost {
    let router = router(&start_engines(workers));
    let engines = EnginesConfig::default();
    let (_config_tx, config_rx) = watch::channel(Arc::new(LoadPollConfig {
        settings: EngineLoadConfig::default(),
        client: EngineClient::new(&engines).unwrap(),
        engines,
    }));
    let metrics = Arc::new(Metrics::new());
    let label = warmroute_metrics::OutcomeLabel { outcome: "ok" };
    let scrapes = || {
        let family = &metrics.workers.engine_load_scrapes;
        family.get_or_create(&label).get() as f64
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        tokio::spawn(run(router.clone(), metrics.clone(), config_rx));
        tokio::time::sleep(WARM_UP).await;
        let cpu_before = thread_cpu();
        let scrapes_before = scrapes();
        let began = Instant::now();
        tokio::time::sleep(MEASURED).await;
        let seconds = began.elapsed().as_secs_f64();
        let load = router.load();
        let reported = load.engine_loads().snapshot(load.now()).len();
        assert_eq!(reported, workers, "every worker has a recent report");
        PollerCost {
            core_share: (thread_cpu() - cpu_before).as_secs_f64() / seconds,
            scrapes_per_second: (scrapes() - scrapes_before) / seconds,
        }
    })
}

#[test]
fn poller_cost_is_small_with_real_pages() {
    if !is_long_form() || cfg!(debug_assertions) {
        return;
    }
    for workers in [100, 1000] {
        let cost = measure(workers);
        println!("{workers} workers: {cost:?}");
        if workers == 100 {
            assert!(cost.core_share < MAX_CORE_SHARE, "{cost:?}");
        }
        assert!(cost.scrapes_per_second < 210.0, "{cost:?}");
    }
}
