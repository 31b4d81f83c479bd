//! Settings of the service for callers that are not Envoy.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::load::ledger::Rules;
use crate::settings::{Period, Problem};
use crate::tls::{ListenerExposure, TlsConfig};

/// `api:`: the router as a gRPC service. Whoever reaches it may book load and pin requests, and nobody is asked who he is;
/// so it is off unless the section is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Where it listens.
    pub listen: SocketAddr,
    /// TLS; none: plaintext.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Serve everybody who reaches an address that is not loopback.
    pub unprotected: bool,
    /// A booking of which nothing was heard for longer than this is released.
    pub silence: Period,
    /// Most bookings at a time.
    pub bookings: u32,
    /// Most blocks of one prompt.
    pub most_blocks: u32,
    /// Most blocks that all bookings together hold.
    pub booked_blocks: u32,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 9903).into(),
            tls: None,
            unprotected: false,
            silence: Period::seconds(300),
            bookings: 1 << 20,
            most_blocks: 1 << 17,
            booked_blocks: 1 << 25,
        }
    }
}

impl ApiConfig {
    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.exposure();
        if self.silence.get() == Duration::ZERO {
            let text = "every booking would end at once; give the time in which callers give a sign of life, such as 300s";
            problems.push(Problem::of("silence", text));
        }
        if self.bookings == 0 {
            problems.push(Problem::of(
                "bookings",
                "nothing could ever be booked; give at least 1",
            ));
        }
        if self.most_blocks == 0 {
            problems.push(Problem::of(
                "most_blocks",
                "no prompt could ever be asked about; give at least 1",
            ));
        }
        if self.booked_blocks < self.most_blocks {
            let text = "a prompt of `most_blocks` could never be booked; give at least as much";
            problems.push(Problem::of("booked_blocks", text));
        }
        problems
    }

    /// Who could reach it who should not.
    fn exposure(&self) -> Vec<Problem> {
        let mut problems: Vec<_> = self.tls.iter().flat_map(TlsConfig::problems).collect();
        problems = problems
            .into_iter()
            .map(|problem| problem.within("tls"))
            .collect();
        let exposure = ListenerExposure {
            key: "listen",
            listen: self.listen,
            tls: self.tls.as_ref(),
            unprotected: self.unprotected,
            risk: "book load and pin requests",
        };
        problems.extend(exposure.problem());
        problems
    }

    /// What bookings have to keep to.
    pub fn rules(&self) -> Rules {
        let most = self.bookings as usize;
        // Enough for words that are repeated; a shorter memory only means that the oldest may be booked again.
        let ended = (most / 8).max(64);
        Rules {
            silence: self.silence.get(),
            most,
            blocks: self.booked_blocks as usize,
            ended,
        }
    }
}
