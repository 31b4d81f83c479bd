//! Settings of the admin HTTP server.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// `admin:`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Where metrics, health and the explanations of decisions are served.
    pub listen: SocketAddr,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self { listen: (Ipv4Addr::LOCALHOST, 9901).into() }
    }
}
