//! Configuration of the gRPC service.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_core::load::ledger::LedgerRules;
use warmroute_runtime::tls::{ListenerExposure, TlsConfig};
use warmroute_settings::{ADDRESS_PATTERN, DurationSetting, Problem, all_within};

/// Maximum number of blocks of one prompt. Each block causes several lookups.
pub const MAX_PROMPT_BLOCKS: usize = 1 << 17;

/// The `listeners.api:` section: the router as a gRPC service. Every client that reaches it can
/// book load and pin requests, and clients are not authenticated. The service is off unless the
/// section exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Listen address.
    #[schemars(extend("pattern" = ADDRESS_PATTERN))]
    pub address: SocketAddr,
    /// TLS settings; `None` for plaintext.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Whether the service is offered without protection on an address that is not loopback.
    pub unprotected: bool,
    /// Time without calls after which a booking expires.
    pub booking_timeout: DurationSetting,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            address: (Ipv4Addr::LOCALHOST, 9903).into(),
            tls: None,
            unprotected: false,
            booking_timeout: DurationSetting::seconds(300),
        }
    }
}

impl ApiConfig {
    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.exposure_problems();
        if self.booking_timeout.get() == Duration::ZERO {
            let text = "every booking would expire immediately; set the longest time between two \
            calls of a client, for example 300s";
            problems.push(Problem::of("booking_timeout", text));
        }
        problems
    }

    /// Returns errors about a listener that is exposed without protection.
    fn exposure_problems(&self) -> Vec<Problem> {
        let tls = self.tls.iter().flat_map(TlsConfig::problems);
        let mut problems: Vec<_> = all_within("tls", tls).collect();
        let exposure = ListenerExposure {
            key: "address",
            listen: self.address,
            tls: self.tls.as_ref(),
            unprotected: self.unprotected,
            allowed_actions: "book load and pin requests",
        };
        problems.extend(exposure.problem());
        problems
    }

    /// Returns the limits of the ledger.
    pub fn ledger_rules(&self) -> LedgerRules {
        let rules = LedgerRules::default();
        LedgerRules {
            idle_timeout: self.booking_timeout.get(),
            // This number suffices to recognize repeated calls. An ended attempt beyond it could be
            // booked again.
            max_ended: rules.max_bookings / 8,
            ..rules
        }
    }
}
