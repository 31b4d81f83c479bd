//! What a running process takes over of another configuration. Sockets, tables and queues that live as long as the process
//! keep the settings they were made with; everything else follows.

use serde_json::Value;

use super::Config;
use super::check;
use crate::settings::Problem;

/// Another configuration, as far as it can be had without a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct Adopted {
    /// What is to hold.
    pub config: Config,
    /// The keys that change with it.
    pub changed: Vec<String>,
    /// The keys that are given otherwise, but stay as they are until a restart.
    pub needs_restart: Vec<String>,
}

impl Config {
    /// What a process that runs with this configuration takes over of another one; or what would not fit together.
    pub fn adopt(&self, wanted: &Self) -> Result<Adopted, Vec<Problem>> {
        let mut config = wanted.clone();
        config.listen = self.listen.clone();
        config.admin = self.admin.clone();
        config.api = self.api.clone();
        config.pool = self.pool.clone();
        config.limits.connections = self.limits.connections;
        config.limits.handshake = self.limits.handshake;
        config.limits.header_list = self.limits.header_list;
        config.limits.streams = self.limits.streams;
        config.tracking_hash = self.tracking_hash.clone();
        config.kv_events = self.kv_events;
        config.load.prefill_durations = self.load.prefill_durations;
        config.queue = self.queue.clone();
        config.sessions = self.sessions.clone();
        config.replicas = self.replicas.clone();
        config.takeover = self.takeover.clone();
        config.serve_index = self.serve_index;
        config.use_remote_index = self.use_remote_index.clone();
        config.approximate = self.approximate.clone();
        config.readiness = self.readiness.clone();
        config.envoy = self.envoy.clone();
        config.log.format = self.log.format;
        let problems = check::problems(&config);
        if !problems.is_empty() {
            return Err(problems);
        }
        let (running, adopted, wanted) = (value(self), value(&config), value(wanted));
        Ok(Adopted {
            changed: differences(&running, &adopted),
            needs_restart: differences(&adopted, &wanted),
            config,
        })
    }

    /// Everything as JSON, for the pages.
    pub fn to_json(&self) -> Value {
        value(self)
    }
}

fn value(config: &Config) -> Value {
    // Every key is a string and every number is finite, so there is nothing that JSON lacks.
    serde_json::to_value(config).unwrap_or_default()
}

/// The keys whose values differ, by their way from the root.
fn differences(a: &Value, b: &Value) -> Vec<String> {
    let mut found = Vec::new();
    compare("", a, b, &mut found);
    found
}

fn compare(way: &str, a: &Value, b: &Value, found: &mut Vec<String>) {
    if a == b {
        return;
    }
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let newcomers = b.keys().filter(|key| !a.contains_key(*key));
            for key in a.keys().chain(newcomers) {
                let inner = if way.is_empty() {
                    key.clone()
                } else {
                    format!("{way}.{key}")
                };
                let side = |side: &serde_json::Map<String, Value>| {
                    side.get(key).cloned().unwrap_or_default()
                };
                compare(&inner, &side(a), &side(b), found);
            }
        }
        // Items have no names; that the list is another one is all there is to say.
        _ => found.push(way.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str =
        "models: [{name: m, block_size: 16}]\nworkers: [{id: 1, endpoint: '10.0.0.1:80'}]\n";

    fn config(more: &str) -> Config {
        Config::parse(
            std::path::Path::new("w.yaml"),
            format!("{BASE}{more}").as_bytes(),
        )
        .unwrap()
    }

    #[test]
    fn what_lives_as_long_as_the_process_stays_and_is_named() {
        let running = config("");
        let more = "listen: {tcp: '127.0.0.1:9008'}\nadmin: {listen: '127.0.0.1:9009'}\nqueue: {deadline: 9s}\n\
                    sessions: {}\nschedule: {router_temperature: 0.5}\nlog: {level: debug, format: json}\n\
                    drain: {deadline: 1s}\nresponse: {why_header: true}\npool: {name: p}\n";
        let adopted = running.adopt(&config(more)).unwrap();
        assert_eq!(
            adopted.changed,
            [
                "schedule.router_temperature",
                "drain.deadline",
                "response.why_header",
                "log.level"
            ]
        );
        let restart = [
            "listen.tcp",
            "admin.listen",
            "queue.deadline",
            "log.format",
            "pool",
            "sessions",
        ];
        assert_eq!(adopted.needs_restart, restart);
        assert_eq!(adopted.config.listen, running.listen);
        assert_eq!(adopted.config.drain, config(more).drain);
    }

    #[test]
    fn the_same_configuration_changes_nothing() {
        let running = config("");
        let adopted = running
            .adopt(&config("# in other words\nschedule: {}\n"))
            .unwrap();
        assert_eq!((adopted.changed, adopted.needs_restart), (vec![], vec![]));
        assert_eq!(adopted.config, running);
    }

    #[test]
    fn what_does_not_fit_to_what_must_stay_is_refused() {
        let running = config("queue: {prefill_busy_threshold: 100}\n");
        // Right in itself, but the queue that runs has a threshold on what would no longer be counted.
        let problems = running
            .adopt(&config("load: {prefill_tokens: false}\n"))
            .unwrap_err();
        assert!(problems[0].text.contains("never reached"), "{problems:?}");
    }
}
