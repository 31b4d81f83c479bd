//! The command line.

use std::path::PathBuf;

use clap::Parser;

/// Compares warmroute with dynamo-kv-router 1.6.1: the same events, the same queries, the same
/// results.
#[derive(Debug, Parser)]
pub struct PeerArgs {
    /// Requests to replay: one JSON object with `input_length`, `output_length` and `hash_ids` per
    /// line, plain or gzipped. Default: a synthetic conversation.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Also write the table to this file, as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Run only measures whose name contains this text.
    #[arg(long)]
    pub only: Option<String>,
    /// Rounds of each side.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Use an eighth of the requests and two rounds, as a smoke test.
    #[arg(long)]
    pub quick: bool,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    pub bench: bool,
}

impl PeerArgs {
    /// Returns the number of rounds of each side.
    pub fn rounds(&self) -> usize {
        if self.quick { 2 } else { self.rounds.max(1) }
    }

    /// Returns true if the measure is selected.
    pub fn wants(&self, measure: &str) -> bool {
        self.only
            .as_deref()
            .is_none_or(|only| measure.contains(only))
    }

    /// Returns true if any of the measures is selected.
    pub fn wants_any(&self, measures: &[&str]) -> bool {
        measures.iter().any(|measure| self.wants(measure))
    }
}
