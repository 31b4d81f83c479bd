//! The report: each measured point, and the goals as rows like those of the benches.

use std::io::{self, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use warmroute_testbed::comparison::{self, ComparisonTable};

use crate::case::MeasuredCase;
use crate::setups::SetupKind;

/// All measurements.
#[derive(Default)]
pub struct LoadReport {
    /// The goals.
    pub table: ComparisonTable,
    points: Vec<Value>,
}

impl LoadReport {
    /// Prints the head of the table of points.
    pub fn print_head() -> io::Result<()> {
        writeln!(
            io::stdout().lock(),
            "{:<34} {:<14} {:>9} {:>9} {:>9} {:>9} {:>9} | {:>7} {:>7} {:>7} {:>7} | {:>7} {:>7}  routed by prompt, decision",
            "",
            "",
            "req/s",
            "p50 ms",
            "p99 ms",
            "+p50",
            "+p99",
            "Envoy",
            "server",
            "client",
            "engine",
            "RSS MiB",
            "peak",
        )
    }

    pub(crate) fn add_point(&mut self, measured: &MeasuredCase) -> io::Result<()> {
        let alone = measured.median(SetupKind::EnvoyAlone);
        let mut out = io::stdout().lock();
        for kind in SetupKind::ALL {
            let sample = measured.median(kind);
            let name = if kind == SetupKind::EnvoyAlone {
                &measured.case.name
            } else {
                ""
            };
            let decision = match (kind, sample.stages.get("total")) {
                (SetupKind::Warmroute, Some(total)) => {
                    format!(
                        "{:.1} %, {total:.0} µs, {:.0} tokens",
                        sample.by_prompt * 100.0,
                        sample.prompt_tokens
                    )
                }
                _ => String::new(),
            };
            writeln!(
                out,
                "{name:<34} {:<14} {:>9.0} {:>9.2} {:>9.2} {:>9.2} {:>9.2} | {:>7.0} {:>7.0} {:>7.0} {:>7.0} | {:>7.0} {:>7.0}  {decision}",
                kind.name(),
                sample.per_second,
                sample.p50_ms,
                sample.p99_ms,
                sample.p50_ms - alone.p50_ms,
                sample.p99_ms - alone.p99_ms,
                sample.cpu_envoy,
                sample.cpu_server,
                sample.cpu_client,
                sample.cpu_engines,
                sample.rss_server_mib,
                sample.peak_server_mib,
            )?;
            let mut point = json!({
                "sweep": measured.case.sweep,
                "measure": measured.case.name,
                "at": measured.case.point,
                "side": kind.name(),
                "added_p50_ms": sample.p50_ms - alone.p50_ms,
                "added_p99_ms": sample.p99_ms - alone.p99_ms,
                "rounds": measured.rounds_of(kind).len(),
            });
            if let (Some(point), Ok(Value::Object(sample))) =
                (point.as_object_mut(), serde_json::to_value(&sample))
            {
                point.extend(sample);
            }
            self.points.push(point);
        }
        Ok(())
    }

    /// Writes the rows of the goals, then the points.
    pub fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        let mut all: Vec<Value> = self
            .table
            .rows()
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<_, _>>()?;
        all.extend(self.points.iter().cloned());
        Ok(comparison::write_json(&all, path)?)
    }
}
