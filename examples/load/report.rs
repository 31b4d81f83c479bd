//! What is printed and written: each point as it was measured, and the goals as rows like those of the benches.

use std::io::{self, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use crate::bed::Side;
use crate::duel::{self, Table};
use crate::measure::{Sample, middle};
use crate::sweeps::Case;

/// Everything that was measured.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) table: Table,
    points: Vec<Value>,
}

/// The rounds of one case, by side.
pub(crate) struct Measured {
    pub(crate) case: Case,
    pub(crate) rounds: Vec<(Side, Vec<Sample>)>,
}

impl Measured {
    pub(crate) fn of(&self, side: Side) -> &[Sample] {
        self.rounds
            .iter()
            .find(|(of, _)| *of == side)
            .map_or(&[], |(_, rounds)| rounds)
    }

    pub(crate) fn middle(&self, side: Side) -> Sample {
        middle(self.of(side))
    }
}

impl Report {
    pub(crate) fn head() -> io::Result<()> {
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

    pub(crate) fn point(&mut self, measured: &Measured) -> io::Result<()> {
        let alone = measured.middle(Side::Alone);
        let mut out = io::stdout().lock();
        for side in Side::ALL {
            let sample = measured.middle(side);
            let name = if side == Side::Alone {
                &measured.case.name
            } else {
                ""
            };
            let decision = match (side, sample.stages.get("total")) {
                (Side::Ours, Some(total)) => {
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
                side.name(),
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
                "at": measured.case.at,
                "side": side.name(),
                "added_p50_ms": sample.p50_ms - alone.p50_ms,
                "added_p99_ms": sample.p99_ms - alone.p99_ms,
                "rounds": measured.of(side).len(),
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

    /// The rows of the goals first, then the points.
    pub(crate) fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        let mut all: Vec<Value> = self
            .table
            .rows()
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<_, _>>()?;
        all.extend(self.points.iter().cloned());
        Ok(duel::write_json(&all, path)?)
    }
}
