//! Settings of the service for callers that are not Envoy.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::load::ledger::Rules;
use crate::settings::{Period, Problem};

/// `api:`: the router as a gRPC service. Whoever reaches it may book load and pin requests, and nobody is asked who he is;
/// so it is off unless the section is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Where it listens.
    pub listen: SocketAddr,
    /// A booking of which nothing was heard for longer than this is released.
    pub silence: Period,
    /// Most bookings at a time.
    pub bookings: u32,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self { listen: (Ipv4Addr::LOCALHOST, 9903).into(), silence: Period::seconds(300), bookings: 1 << 20 }
    }
}

impl ApiConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.silence.get() == Duration::ZERO {
            let text =
                "every booking would end at once; give the time in which callers give a sign of life, such as 300s";
            problems.push(Problem::of("silence", text));
        }
        if self.bookings == 0 {
            problems.push(Problem::of("bookings", "nothing could ever be booked; give at least 1"));
        }
        problems
    }

    /// What bookings have to keep to.
    pub fn rules(&self) -> Rules {
        Rules { silence: self.silence.get(), most: self.bookings as usize }
    }
}
