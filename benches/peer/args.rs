//! The command line.

use std::path::PathBuf;

use clap::Parser;

/// Measures warmroute beside dynamo-kv-router 1.6.1: the same events, the same questions, the same answers.
#[derive(Debug, Parser)]
pub struct Args {
    /// Requests to replay: one JSON object with `input_length`, `output_length` and `hash_ids` a line, plain or gzipped.
    /// Without it a conversation is made up.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Also write the table there, as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Only measures that have this in their name.
    #[arg(long)]
    pub only: Option<String>,
    /// Rounds of each side.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// An eighth of the requests, two rounds: to see that it runs.
    #[arg(long)]
    pub quick: bool,
    /// Cargo says that this is a bench.
    #[arg(long, hide = true)]
    pub bench: bool,
}

impl Args {
    /// Rounds of each side.
    pub fn rounds(&self) -> usize {
        if self.quick { 2 } else { self.rounds.max(1) }
    }

    /// Whether a measure of this name is asked for.
    pub fn wants(&self, measure: &str) -> bool {
        self.only
            .as_deref()
            .is_none_or(|only| measure.contains(only))
    }

    /// Whether any of some measures is.
    pub fn wants_any(&self, measures: &[&str]) -> bool {
        measures.iter().any(|measure| self.wants(measure))
    }
}
