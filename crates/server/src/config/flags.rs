//! Command-line flags that override or replace the configuration file. They have the names and
//! meanings that gateway charts and conformance tests use for an endpoint picker, so that warmroute
//! is a drop-in replacement.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use warmroute_runtime::tls::TlsConfig;
use warmroute_settings::DurationSetting;

use super::{Config, LogFormat, LogLevel, PoolConfig};

/// Settings that override the configuration file. By default, none is set.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct ServeFlags {
    /// Name of the InferencePool whose pods are the workers, unless the file configures other
    /// workers
    #[arg(long, value_name = "NAME")]
    pub pool_name: Option<String>,
    /// Namespace of the pool; default: the namespace of this pod
    #[arg(long, value_name = "NAME")]
    pub pool_namespace: Option<String>,
    /// Port of ext_proc on all addresses; overrides `listeners.ext_proc.address`
    #[arg(long, value_name = "PORT")]
    pub grpc_port: Option<u16>,
    /// Port of the gRPC health service on all addresses; overrides
    /// `listeners.ext_proc.health_address`
    #[arg(long, value_name = "PORT")]
    pub grpc_health_port: Option<u16>,
    /// Serve ext_proc with TLS. Without a configured certificate, a self-signed one is created at
    /// start
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub secure_serving: Option<bool>,
    /// Directory with the certificate of ext_proc: tls.crt and tls.key
    // A relative path is relative to the working directory, not to the configuration file.
    #[arg(long = "cert-path", value_name = "DIR", value_parser = |path: &str| std::path::absolute(path))]
    pub cert_dir: Option<PathBuf>,
    /// Time to continue serving after the stop signal; overrides `process.drain.grace_period`
    #[arg(long = "drain-timeout", value_name = "TIME")]
    pub drain_grace: Option<DurationSetting>,
    /// Port of the admin pages; their address stays that of `listeners.admin.address`
    #[arg(long, value_name = "PORT")]
    pub metrics_port: Option<u16>,
    /// Log format: json or console
    #[arg(long = "zap-encoder", value_name = "FORMAT", value_parser = parse_log_format)]
    pub log_format: Option<LogFormat>,
    /// Log verbosity: 0 to 3 info, 4 debug, 5 and above trace
    #[arg(long = "v", short = 'v', value_name = "LEVEL", value_parser = parse_log_level)]
    pub log_level: Option<LogLevel>,
}

impl ServeFlags {
    /// Returns the text of the configuration for a process without a file. It matches the endpoint
    /// picker of the conformance tests, which receives only flags: the same ports, TLS and headers.
    /// Without a tokenizer, routing is load-only.
    pub fn default_document(&self) -> Vec<u8> {
        let config = json!({
            "listeners": {"ext_proc": {
                "address": "0.0.0.0:9002",
                "health_address": "0.0.0.0:9003",
                "tls": {"self_signed": true},
                "unprotected": true,
            }},
            "models": [{"name": self.pool_name}],
            "workers": {"kubernetes": {
                "pools": [{"name": self.pool_name, "namespace": self.pool_namespace}],
            }},
            "engines": {"discovery": {"enabled": false}},
            "gateway": {
                "default_body_mode": "full_duplex",
                "conformance": true,
                "failure": {"mode": "fail_closed"},
            },
            // The process is ready as soon as the pool is known, even if it is empty.
            "process": {"readiness": {"min_workers": 0}},
        });
        config.to_string().into_bytes()
    }

    /// Applies the flags to a configuration.
    pub(super) fn override_config(&self, config: &mut Config) {
        let all = |port: u16| Some(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)));
        if self.pool_name.is_some() || self.pool_namespace.is_some() {
            let pool = config.process.pool.get_or_insert_with(PoolConfig::default);
            pool.name = self.pool_name.clone().or(pool.name.take());
            pool.namespace = self.pool_namespace.clone().or(pool.namespace.take());
            self.select_pool(config);
        }
        if let Some(port) = self.grpc_port {
            config.listeners.ext_proc.address = all(port);
        }
        if let Some(port) = self.grpc_health_port {
            config.listeners.ext_proc.health_address = all(port);
        }
        self.apply_tls(&mut config.listeners.ext_proc.tls);
        // `grpc_port` opens the port to all hosts, as charts of endpoint pickers expect.
        config.listeners.ext_proc.unprotected |= self.grpc_port.is_some()
            && !config
                .listeners
                .ext_proc
                .tls
                .as_ref()
                .is_some_and(TlsConfig::is_mutual);
        if let Some(port) = self.metrics_port {
            config.listeners.admin.address.set_port(port);
        }
        config.process.drain.grace_period = self
            .drain_grace
            .unwrap_or(config.process.drain.grace_period);
        config.process.log.format = self.log_format.unwrap_or(config.process.log.format);
        config.process.log.level = self.log_level.unwrap_or(config.process.log.level);
    }

    /// Replaces name and namespace of the file's pool if it is the only one and has no selector.
    fn select_pool(&self, config: &mut Config) {
        let Some([pool]) = config
            .workers
            .kubernetes
            .as_mut()
            .map(|kubernetes| &mut kubernetes.pools[..])
        else {
            return;
        };
        if pool.selector.is_empty() {
            pool.name = self.pool_name.clone().or(pool.name.take());
            pool.namespace = self.pool_namespace.clone().or(pool.namespace.take());
        }
    }

    /// Applies `secure_serving` and `cert_dir`. The directory replaces the certificate of the file.
    /// If `secure_serving` is true and there is no certificate, a self-signed one is used.
    fn apply_tls(&self, tls: &mut Option<TlsConfig>) {
        match (self.secure_serving, &self.cert_dir) {
            (Some(false), _) => *tls = None,
            (_, Some(dir)) => {
                let client_ca = tls.take().and_then(|tls| tls.client_ca);
                *tls = Some(TlsConfig {
                    cert_dir: Some(dir.clone()),
                    client_ca,
                    ..TlsConfig::default()
                });
            }
            (Some(true), None) => {
                tls.get_or_insert_with(|| TlsConfig {
                    self_signed: true,
                    ..TlsConfig::default()
                });
            }
            (None, None) => {}
        }
    }
}

fn parse_log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "json" => Ok(LogFormat::Json),
        "console" => Ok(LogFormat::Text),
        _ => Err("expected json or console".to_owned()),
    }
}

/// Parses the verbosity of gateway charts. Their default is 2; 4 is for debugging.
fn parse_log_level(text: &str) -> Result<LogLevel, std::num::ParseIntError> {
    Ok(match text.parse::<u8>()? {
        0..=3 => LogLevel::Info,
        4 => LogLevel::Debug,
        5.. => LogLevel::Trace,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overridden(file: &str, flags: &ServeFlags) -> Config {
        let text = format!(
            "models: [{{name: m}}]\nworkers: {{list: [{{id: 1, endpoint: '10.0.0.1:80'}}]}}\n{file}"
        );
        let mut config =
            Config::parse(std::path::Path::new("/etc/w.yaml"), text.as_bytes()).unwrap();
        flags.override_config(&mut config);
        config
    }

    #[test]
    fn flags_override_only_their_own_keys() {
        let file = "listeners: {ext_proc: {unix_socket: /run/w.sock, health_address: '127.0.0.1:1'}, admin: {address: '127.0.0.1:2'}}\n\
                    process: {pool: {name: a, namespace: b}, log: {format: json}}\n";
        assert_eq!(
            overridden(file, &ServeFlags::default()),
            overridden(
                file,
                &ServeFlags {
                    metrics_port: Some(2),
                    ..ServeFlags::default()
                }
            )
        );
        let flags = ServeFlags {
            pool_name: Some("c".to_owned()),
            grpc_port: Some(9002),
            grpc_health_port: Some(9003),
            metrics_port: Some(9090),
            log_level: Some(LogLevel::Debug),
            ..ServeFlags::default()
        };
        let config = overridden(file, &flags);
        assert_eq!(
            config.listeners.ext_proc.address,
            Some("0.0.0.0:9002".parse().unwrap())
        );
        assert_eq!(
            config.listeners.ext_proc.unix_socket,
            Some("/run/w.sock".into())
        );
        assert_eq!(
            config.listeners.ext_proc.health_address,
            Some("0.0.0.0:9003".parse().unwrap())
        );
        assert_eq!(
            config.listeners.admin.address,
            "127.0.0.1:9090".parse().unwrap()
        );
        assert_eq!(
            config.process.pool,
            Some(PoolConfig {
                name: Some("c".to_owned()),
                namespace: Some("b".to_owned())
            })
        );
        assert_eq!(
            (config.process.log.level, config.process.log.format),
            (LogLevel::Debug, LogFormat::Json)
        );
    }

    fn pool_flags() -> ServeFlags {
        ServeFlags {
            pool_name: Some("primary".to_owned()),
            pool_namespace: Some("apps".to_owned()),
            grpc_health_port: Some(1),
            drain_grace: Some(DurationSetting::seconds(7)),
            ..ServeFlags::default()
        }
    }

    #[test]
    fn flags_alone_are_a_configuration() {
        let config = Config::of_flags(&pool_flags()).unwrap();
        let shown = config.to_json();
        assert_eq!(
            shown["workers"]["kubernetes"]["pools"][0]["name"],
            "primary"
        );
        assert_eq!(
            shown["workers"]["kubernetes"]["pools"][0]["namespace"],
            "apps"
        );
        assert_eq!(
            shown["process"]["pool"],
            json!({"name": "primary", "namespace": "apps"})
        );
        assert_eq!(
            (
                &shown["listeners"]["ext_proc"]["address"],
                &shown["listeners"]["ext_proc"]["health_address"]
            ),
            (&json!("0.0.0.0:9002"), &json!("0.0.0.0:1"))
        );
        assert_eq!(
            (
                config.listeners.ext_proc.tls.unwrap().self_signed,
                config.gateway.conformance
            ),
            (true, true)
        );
        assert_eq!(
            config.process.drain.grace_period,
            DurationSetting::seconds(7)
        );
    }

    #[test]
    fn pool_flags_need_a_name_only() {
        let plaintext_flags = ServeFlags {
            secure_serving: Some(false),
            pool_namespace: None,
            ..pool_flags()
        };
        let config = Config::of_flags(&plaintext_flags).unwrap();
        assert_eq!(
            (
                config.listeners.ext_proc.tls,
                config.workers.kubernetes.unwrap().pools[0]
                    .namespace
                    .as_ref()
            ),
            (None, None)
        );
        let errors = Config::of_flags(&ServeFlags {
            pool_name: Some(String::new()),
            ..plaintext_flags
        })
        .unwrap_err();
        assert!(
            errors
                .iter()
                .any(|error| error.to_string().contains("the name is empty")),
            "{errors:?}"
        );
    }

    #[test]
    fn pool_of_flags_replaces_pool_of_file() {
        let pools_with_flags = |pools: &str| {
            let text =
                format!("models: [{{name: m}}]\nworkers: {{kubernetes: {{pools: {pools}}}}}\n");
            let flags = ServeFlags {
                pool_name: Some("b".to_owned()),
                pool_namespace: Some("c".to_owned()),
                ..ServeFlags::default()
            };
            let config =
                Config::parse_with(std::path::Path::new("w.yaml"), text.as_bytes(), &flags)
                    .unwrap();
            let pools = config.workers.kubernetes.unwrap().pools;
            pools
                .into_iter()
                .map(|pool| (pool.name, pool.namespace))
                .collect::<Vec<_>>()
        };
        let own = |name: &str| Some(name.to_owned());
        let named = vec![(own("b"), own("c"))];
        assert_eq!(pools_with_flags("[{name: a, namespace: x}]"), named);
        assert_eq!(
            pools_with_flags("[{worker: {kv_events: {port: 5557}}}]"),
            named,
            "the pool of the file only has a worker template"
        );
        assert_eq!(
            pools_with_flags("[{selector: {app: x}, ports: [80]}]"),
            [(None, None)]
        );
        assert_eq!(
            pools_with_flags("[{name: a}, {name: x}]"),
            [(own("a"), None), (own("x"), None)]
        );
    }

    #[test]
    fn secure_serving_chooses_a_certificate() {
        let tls = |secure_serving, cert_dir: Option<&str>| {
            let flags = ServeFlags {
                secure_serving,
                cert_dir: cert_dir.map(PathBuf::from),
                ..ServeFlags::default()
            };
            overridden("", &flags).listeners.ext_proc.tls
        };
        let own = Some(TlsConfig {
            self_signed: true,
            ..TlsConfig::default()
        });
        let given = Some(TlsConfig {
            cert_dir: Some("/certs".into()),
            ..TlsConfig::default()
        });
        let cases = [
            (None, None, None),
            (Some(true), None, own),
            (Some(true), Some("/certs"), given.clone()),
            (None, Some("/certs"), given),
            (Some(false), Some("/certs"), None),
        ];
        for (secure, dir, expected) in cases {
            assert_eq!(tls(secure, dir), expected, "{secure:?} {dir:?}");
        }
        let mut file = Some(TlsConfig {
            self_signed: true,
            client_ca: Some("/ca".into()),
            ..TlsConfig::default()
        });
        ServeFlags {
            secure_serving: Some(true),
            ..ServeFlags::default()
        }
        .apply_tls(&mut file);
        assert_eq!(
            file.unwrap().client_ca,
            Some("/ca".into()),
            "the client CA of the file was dropped"
        );
    }
}
