//! Reload of the configuration of a running process. The settings of sockets, tables and queues,
//! which exist as long as the process, stay unchanged; all other settings are applied.

use serde_json::Value;
use warmroute_settings::Problem;

use super::{Config, check};

/// New configuration, restricted to the settings that apply without a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct ReloadedConfig {
    /// Effective configuration.
    pub config: Config,
    /// Keys whose values change.
    pub changed: Vec<String>,
    /// Keys with new values that take effect only after a restart.
    pub needs_restart: Vec<String>,
}

impl Config {
    /// Applies the reloadable keys of `wanted` to this configuration. Returns the problems of the
    /// combination, if any.
    pub fn apply_reload(&self, wanted: &Self) -> Result<ReloadedConfig, Vec<Problem>> {
        let mut config = wanted.clone();
        config.listeners.ext_proc = self.listeners.ext_proc.clone();
        config.listeners.admin = self.listeners.admin.clone();
        config.listeners.api = self.listeners.api.clone();
        config.process.pool = self.process.pool.clone();
        config.listeners.limits.max_connections = self.listeners.limits.max_connections;
        config.listeners.limits.handshake_timeout = self.listeners.limits.handshake_timeout;
        config.listeners.limits.max_header_list_size = self.listeners.limits.max_header_list_size;
        config.routing.block_hash = self.routing.block_hash.clone();
        config.engines.kv_events = self.engines.kv_events;
        config.routing.load.prefill_decay = self.routing.load.prefill_decay;
        config.queue = self.queue.clone();
        config.sessions = self.sessions.clone();
        config.replicas = self.replicas.clone();
        config.index.warm_start = self.index.warm_start.clone();
        config.index.serve = self.index.serve;
        config.index.remote = self.index.remote.clone();
        config.index.approximate = self.index.approximate.clone();
        config.process.readiness = self.process.readiness.clone();
        config.envoy = self.envoy.clone();
        config.process.log.format = self.process.log.format;
        let problems = check::problems(&config);
        if !problems.is_empty() {
            return Err(problems);
        }
        let running = value(self);
        let reloaded = value(&config);
        let wanted = value(wanted);
        Ok(ReloadedConfig {
            changed: differences(&running, &reloaded),
            needs_restart: differences(&reloaded, &wanted),
            config,
        })
    }

    /// Returns the keys whose values differ from `running`, a configuration as JSON.
    pub fn differing_keys(&self, running: &Value) -> Vec<String> {
        differences(running, &value(self))
    }

    /// Returns the whole configuration as JSON, for the status pages.
    pub fn to_json(&self) -> Value {
        value(self)
    }
}

fn value(config: &Config) -> Value {
    // Every key is a string, every number is finite, and every path is UTF-8, so the conversion
    // cannot fail.
    serde_json::to_value(config).unwrap_or_default()
}

/// Returns the paths of the keys whose values differ.
fn differences(a: &Value, b: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", a, b, &mut found);
    found
}

fn compare(path: &str, a: &Value, b: &Value, found: &mut Vec<String>) {
    if a == b {
        return;
    }
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let added = b.keys().filter(|key| !a.contains_key(*key));
            for key in a.keys().chain(added) {
                let inner = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                let value_of = |map: &serde_json::Map<String, Value>| {
                    map.get(key).cloned().unwrap_or_default()
                };
                compare(&inner, &value_of(a), &value_of(b), found);
            }
        }
        // List items have no names, so only the list is reported.
        _ => found.push(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "models: [{name: m, block_size: 16}]\nworkers: {list: [{id: 1, endpoint: '10.0.0.1:80'}]}\n";

    fn config(extra: &str) -> Config {
        Config::parse(
            std::path::Path::new("w.yaml"),
            format!("{BASE}{extra}").as_bytes(),
        )
        .unwrap()
    }

    #[test]
    fn paths_must_be_utf8() {
        use std::os::unix::ffi::OsStrExt as _;
        let file = std::path::Path::new(std::ffi::OsStr::from_bytes(b"/a\xff/w.yaml"));
        let relative = format!("{BASE}envoy: {{endpoints_file: eds.yaml}}\n");
        let errors = Config::parse(file, relative.as_bytes()).unwrap_err();
        assert!(errors[0].problem.contains("not valid UTF-8"), "{errors:?}");
        assert!(Config::parse(file, BASE.as_bytes()).is_ok());
    }

    #[test]
    fn settings_that_need_a_restart_are_reported() {
        let running = config("");
        let extra = "listeners: {ext_proc: {address: '127.0.0.1:9008'}, admin: {address: '127.0.0.1:9009'}}\n\
                    queue: {timeout: 9s}\nsessions: {}\nrouting: {weights: {router_temperature: 0.5}}\n\
                    gateway: {response_headers: {why: true}}\n\
                    process: {log: {level: debug, format: json}, drain: {timeout: 1s}, pool: {name: p}}\n";
        let reloaded = running.apply_reload(&config(extra)).unwrap();
        assert_eq!(
            reloaded.changed,
            [
                "routing.weights.router_temperature",
                "gateway.response_headers.why",
                "process.drain.timeout",
                "process.log.level"
            ]
        );
        let restart = [
            "listeners.ext_proc.address",
            "listeners.admin.address",
            "queue.timeout",
            "process.log.format",
            "process.pool",
            "sessions",
        ];
        assert_eq!(reloaded.needs_restart, restart);
        assert_eq!(
            reloaded.config.listeners.ext_proc,
            running.listeners.ext_proc
        );
        assert_eq!(reloaded.config.process.drain, config(extra).process.drain);
    }

    #[test]
    fn equal_configuration_changes_nothing() {
        let running = config("");
        let reloaded = running
            .apply_reload(&config("# the default weights\nrouting: {weights: {}}\n"))
            .unwrap();
        assert_eq!((reloaded.changed, reloaded.needs_restart), (vec![], vec![]));
        assert_eq!(reloaded.config, running);
    }

    #[test]
    fn conflict_with_retained_settings_is_rejected() {
        let running = config("queue: {prefill_busy_threshold: 100}\n");
        // Valid alone, but the running queue has a threshold on tokens that would not be counted.
        let problems = running
            .apply_reload(&config("routing: {load: {prefill_tokens: false}}\n"))
            .unwrap_err();
        assert!(problems[0].text.contains("never reached"), "{problems:?}");
    }
}
