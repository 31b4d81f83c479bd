//! What the command line says over the configuration file. The names and meanings are those that gateways' charts pass to
//! an endpoint picker, so that warmroute can stand in its place.

use std::net::{Ipv4Addr, SocketAddr};

use super::{Config, LogFormat, LogLevel, PoolConfig};

/// What is said over the file; nothing by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Name of the pool that is served.
    pub pool_name: Option<String>,
    /// Its namespace.
    pub pool_namespace: Option<String>,
    /// Port of ext_proc, on all addresses.
    pub grpc_port: Option<u16>,
    /// Port of gRPC health alone, on all addresses.
    pub grpc_health_port: Option<u16>,
    /// Port of the admin pages; the address stays what the file says.
    pub metrics_port: Option<u16>,
    /// Form of the log.
    pub log_format: Option<LogFormat>,
    /// How much is logged.
    pub log_level: Option<LogLevel>,
}

impl Flags {
    /// Lays them over a configuration.
    pub(super) fn lay_over(&self, config: &mut Config) {
        let all = |port: u16| Some(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)));
        if self.pool_name.is_some() || self.pool_namespace.is_some() {
            let pool = config.pool.get_or_insert_with(PoolConfig::default);
            pool.name = self.pool_name.clone().or(pool.name.take());
            pool.namespace = self.pool_namespace.clone().or(pool.namespace.take());
        }
        if let Some(port) = self.grpc_port {
            config.listen.tcp = all(port);
        }
        if let Some(port) = self.grpc_health_port {
            config.listen.health = all(port);
        }
        if let Some(port) = self.metrics_port {
            config.admin.listen.set_port(port);
        }
        config.log.format = self.log_format.unwrap_or(config.log.format);
        config.log.level = self.log_level.unwrap_or(config.log.level);
    }
}
