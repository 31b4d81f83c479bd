//! Outstanding requests of each engine over time, as the engines count them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Time between two readings.
const INTERVAL: Duration = Duration::from_millis(200);

/// Outstanding requests of all engines at one time.
#[derive(Clone, Debug)]
pub(super) struct EngineReading {
    /// Time since the start of the run.
    pub(super) at: Duration,
    /// Running and waiting requests by engine.
    pub(super) outstanding: Vec<f64>,
}

/// Reads the counters of the engines until a time has passed.
pub(super) async fn watch_engines(
    addresses: &[SocketAddr],
    began: Instant,
    duration: Duration,
) -> anyhow::Result<Vec<EngineReading>> {
    let client = warmroute_runtime::tls::http_client_builder().build()?;
    let end = Instant::now() + duration;
    let mut readings = Vec::new();
    while Instant::now() < end {
        let at = began.elapsed();
        let counters = addresses.iter().map(async |address| {
            let page = client.get(format!("http://{address}/metrics")).send();
            anyhow::Ok(count_requests(&page.await?.text().await?))
        });
        readings.push(EngineReading {
            at,
            outstanding: futures_util::future::try_join_all(counters).await?,
        });
        tokio::time::sleep(INTERVAL).await;
    }
    Ok(readings)
}

/// Returns the running and waiting requests of a metrics page.
fn count_requests(page: &str) -> f64 {
    let names = ["vllm:num_requests_running{", "vllm:num_requests_waiting{"];
    let lines = page.lines();
    lines
        .filter(|line| names.iter().any(|name| line.starts_with(name)))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_and_waiting_requests_are_counted() {
        let page = "# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\"} 2.0\n\
            vllm:num_requests_waiting{engine=\"0\"} 3.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"0\"} 3.0\n";
        assert_eq!(count_requests(page), 5.0);
    }
}
