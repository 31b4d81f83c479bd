//! Load cases and their measured rounds.

use serde_json::Value;
use warmroute_testbed::deployment::MODEL;

use crate::measure::{RoundSample, median_sample};
use crate::repository_texts::NewText;
use crate::setups::SetupKind;

/// A model that warmroute does not know.
pub(crate) const UNKNOWN_MODEL: &str = "not-a-served-model";

/// Parameters of one load measurement. A case may be a point of a sweep.
#[derive(Clone, Debug)]
pub struct LoadCase {
    /// Name of its rows.
    pub name: String,
    pub(crate) sweep: &'static str,
    /// Position on the curve.
    pub(crate) point: Value,
    /// Approximate length of a request.
    pub bytes: usize,
    pub(crate) is_warm: bool,
    /// The requested model.
    pub(crate) model: &'static str,
    /// Bytes of a system prompt that all conversations share.
    pub(crate) shared_bytes: Option<usize>,
    pub(crate) connections: usize,
    pub(crate) chunks: usize,
    /// Number of responses of other requests that stay open during the measurement.
    pub(crate) open_responses: usize,
    /// New text of each request, if the messages are texts of the repository instead of random
    /// sentences.
    pub(crate) repository_texts: Option<NewText>,
}

impl LoadCase {
    /// Returns a case that is not part of a sweep. Its requests have about `bytes` bytes.
    pub fn new(name: String, bytes: usize, is_warm: bool, connections: usize) -> Self {
        Self {
            name,
            sweep: "",
            point: Value::Null,
            bytes,
            is_warm,
            model: MODEL,
            shared_bytes: None,
            connections,
            chunks: 1,
            open_responses: 0,
            repository_texts: None,
        }
    }

    /// Selects a model that warmroute does not know, so that requests are routed by load only.
    pub fn with_unknown_model(self) -> Self {
        Self {
            model: UNKNOWN_MODEL,
            ..self
        }
    }

    /// Sets the number of pieces of each response.
    pub fn with_chunks(self, chunks: usize) -> Self {
        Self { chunks, ..self }
    }

    /// Uses texts of the repository as messages. `new_text` is the part that is new in each request.
    pub fn with_repository_texts(self, new_text: NewText) -> Self {
        Self {
            repository_texts: Some(new_text),
            ..self
        }
    }

    /// Makes the case a point of a sweep.
    pub(crate) fn at_point(self, sweep: &'static str, point: Value) -> Self {
        let temperature = if self.is_warm { "warm" } else { "cold" };
        Self {
            name: format!("{}, {temperature}", self.name),
            sweep,
            point,
            ..self
        }
    }
}

/// The rounds of one case, by setup.
pub struct MeasuredCase {
    pub(crate) case: LoadCase,
    pub(crate) rounds: Vec<(SetupKind, Vec<RoundSample>)>,
}

impl MeasuredCase {
    /// Returns the rounds of a setup.
    pub fn rounds_of(&self, kind: SetupKind) -> &[RoundSample] {
        self.rounds
            .iter()
            .find(|(of, _)| *of == kind)
            .map_or(&[], |(_, rounds)| rounds)
    }

    pub(crate) fn median(&self, kind: SetupKind) -> RoundSample {
        median_sample(self.rounds_of(kind))
    }
}
