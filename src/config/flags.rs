//! What the command line says over the configuration file, or in place of it. The names and meanings are those that gateways'
//! charts and conformance tests pass to an endpoint picker, so that warmroute can stand in its place.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::{Config, LogFormat, LogLevel, PoolConfig};
use crate::settings::Period;
use crate::tls::TlsConfig;

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
    /// TLS of ext_proc by TCP: with the certificate of the file or of `cert_dir`, else with one made at start; or none.
    pub secure_serving: Option<bool>,
    /// Where the certificate of ext_proc is, as `tls.crt` and `tls.key`.
    pub cert_dir: Option<PathBuf>,
    /// How long all is as before after the signal to stop.
    pub drain_grace: Option<Period>,
    /// Port of the admin pages; the address stays what the file says.
    pub metrics_port: Option<u16>,
    /// Form of the log.
    pub log_format: Option<LogFormat>,
    /// How much is logged.
    pub log_level: Option<LogLevel>,
}

impl Flags {
    /// What holds where there is no file: the pool is served as by the endpoint picker of the conformance tests, which is given
    /// nothing else. Its ports and its TLS, their headers, and no tokenizer, so that load alone decides.
    pub(super) fn without_file(&self) -> Value {
        json!({
            "listen": {"tcp": "0.0.0.0:9002", "health": "0.0.0.0:9003", "tls": {"self_signed": true}, "unprotected": true},
            "models": [{"name": self.pool_name}],
            "kubernetes": {"pools": [{"name": self.pool_name, "namespace": self.pool_namespace}]},
            "learn": {"enabled": false},
            "gateway": {"assume": "full_duplex", "conformance": true},
            "failure": {"mode": "fail_closed"},
            // Ready when the pool is known, and be it empty.
            "readiness": {"min_initial_workers": 0},
        })
    }

    /// Lays them over a configuration.
    pub(super) fn lay_over(&self, config: &mut Config) {
        let all = |port: u16| Some(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)));
        if self.pool_name.is_some() || self.pool_namespace.is_some() {
            let pool = config.pool.get_or_insert_with(PoolConfig::default);
            pool.name = self.pool_name.clone().or(pool.name.take());
            pool.namespace = self.pool_namespace.clone().or(pool.namespace.take());
            self.follow(config);
        }
        if let Some(port) = self.grpc_port {
            config.listen.tcp = all(port);
        }
        if let Some(port) = self.grpc_health_port {
            config.listen.health = all(port);
        }
        self.secure(&mut config.listen.tls);
        // The flag opens the port to all hosts, as charts of endpoint pickers expect.
        config.listen.unprotected |= self.grpc_port.is_some()
            && !config.listen.tls.as_ref().is_some_and(TlsConfig::is_mutual);
        if let Some(port) = self.metrics_port {
            config.admin.listen.set_port(port);
        }
        config.drain.grace = self.drain_grace.unwrap_or(config.drain.grace);
        config.log.format = self.log_format.unwrap_or(config.log.format);
        config.log.level = self.log_level.unwrap_or(config.log.level);
    }

    /// Where the workers are the pods of one InferencePool, it is the one that is named. Selectors and several pools stay.
    fn follow(&self, config: &mut Config) {
        let Some([pool]) = config
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

    /// The certificate that is named, else the one of the file, else one made at start.
    fn secure(&self, tls: &mut Option<TlsConfig>) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn laid(file: &str, flags: &Flags) -> Config {
        let text =
            format!("models: [{{name: m}}]\nworkers: [{{id: 1, endpoint: '10.0.0.1:80'}}]\n{file}");
        let mut config =
            Config::parse(std::path::Path::new("/etc/w.yaml"), text.as_bytes()).unwrap();
        flags.lay_over(&mut config);
        config
    }

    #[test]
    fn flags_win_over_the_file_and_leave_the_rest_alone() {
        let file = "listen: {unix: /run/w.sock, health: '127.0.0.1:1'}\nadmin: {listen: '127.0.0.1:2'}\n\
                    pool: {name: a, namespace: b}\nlog: {format: json}\n";
        assert_eq!(
            laid(file, &Flags::default()),
            laid(
                file,
                &Flags {
                    metrics_port: Some(2),
                    ..Flags::default()
                }
            )
        );
        let flags = Flags {
            pool_name: Some("c".to_owned()),
            grpc_port: Some(9002),
            grpc_health_port: Some(9003),
            metrics_port: Some(9090),
            log_level: Some(LogLevel::Debug),
            ..Flags::default()
        };
        let config = laid(file, &flags);
        assert_eq!(config.listen.tcp, Some("0.0.0.0:9002".parse().unwrap()));
        assert_eq!(config.listen.unix, Some("/run/w.sock".into()));
        assert_eq!(config.listen.health, Some("0.0.0.0:9003".parse().unwrap()));
        assert_eq!(config.admin.listen, "127.0.0.1:9090".parse().unwrap());
        assert_eq!(
            config.pool,
            Some(PoolConfig {
                name: Some("c".to_owned()),
                namespace: Some("b".to_owned())
            })
        );
        assert_eq!(
            (config.log.level, config.log.format),
            (LogLevel::Debug, LogFormat::Json)
        );
    }

    #[test]
    fn flags_alone_are_a_configuration() {
        let flags = Flags {
            pool_name: Some("primary".to_owned()),
            pool_namespace: Some("apps".to_owned()),
            grpc_health_port: Some(1),
            drain_grace: Some(Period::seconds(7)),
            ..Flags::default()
        };
        let config = Config::of_flags(&flags).unwrap();
        let shown = config.to_json();
        assert_eq!(shown["kubernetes"]["pools"][0]["name"], "primary");
        assert_eq!(shown["kubernetes"]["pools"][0]["namespace"], "apps");
        assert_eq!(
            shown["pool"],
            json!({"name": "primary", "namespace": "apps"})
        );
        assert_eq!(
            (&shown["listen"]["tcp"], &shown["listen"]["health"]),
            (&json!("0.0.0.0:9002"), &json!("0.0.0.0:1"))
        );
        assert_eq!(
            (
                config.listen.tls.unwrap().self_signed,
                config.gateway.conformance
            ),
            (true, true)
        );
        assert_eq!(config.drain.grace, Period::seconds(7));
        let plain = Flags {
            secure_serving: Some(false),
            pool_namespace: None,
            ..flags
        };
        let config = Config::of_flags(&plain).unwrap();
        assert_eq!(
            (
                config.listen.tls,
                config.kubernetes.unwrap().pools[0].namespace.as_ref()
            ),
            (None, None)
        );
        let wrong = Config::of_flags(&Flags {
            pool_name: Some(String::new()),
            ..plain
        })
        .unwrap_err();
        assert!(
            wrong
                .iter()
                .any(|wrong| wrong.to_string().contains("the name is empty")),
            "{wrong:?}"
        );
    }

    #[test]
    fn the_pool_of_the_flags_is_followed_in_place_of_that_of_the_file() {
        let followed = |pools: &str| {
            let text = format!("models: [{{name: m}}]\nkubernetes: {{pools: {pools}}}\n");
            let flags = Flags {
                pool_name: Some("b".to_owned()),
                pool_namespace: Some("c".to_owned()),
                ..Flags::default()
            };
            let config =
                Config::parse_with(std::path::Path::new("w.yaml"), text.as_bytes(), &flags)
                    .unwrap();
            let pools = config.kubernetes.unwrap().pools;
            pools
                .into_iter()
                .map(|pool| (pool.name, pool.namespace))
                .collect::<Vec<_>>()
        };
        let own = |name: &str| Some(name.to_owned());
        let named = vec![(own("b"), own("c"))];
        assert_eq!(followed("[{name: a, namespace: x}]"), named);
        assert_eq!(
            followed("[{worker: {kv_events: {port: 5557}}}]"),
            named,
            "the file says only what the workers are like"
        );
        assert_eq!(
            followed("[{selector: {app: x}, ports: [80]}]"),
            [(None, None)]
        );
        assert_eq!(
            followed("[{name: a}, {name: x}]"),
            [(own("a"), None), (own("x"), None)]
        );
    }

    #[test]
    fn secure_serving_finds_its_certificate() {
        let tls = |secure_serving, cert_dir: Option<&str>| {
            let flags = Flags {
                secure_serving,
                cert_dir: cert_dir.map(PathBuf::from),
                ..Flags::default()
            };
            laid("", &flags).listen.tls
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
        Flags {
            secure_serving: Some(true),
            ..Flags::default()
        }
        .secure(&mut file);
        assert_eq!(
            file.unwrap().client_ca,
            Some("/ca".into()),
            "what the file says of clients holds"
        );
    }
}
