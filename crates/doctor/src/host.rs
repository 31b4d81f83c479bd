//! Checks of warmroute itself: the configuration, the limit of open files, and its listeners.

use std::path::PathBuf;

use warmroute_settings::format_count;

use super::finding::{Finding, FindingBuilder};

/// Number of open files besides connections: logs, watches, tokenizers, listeners.
const BASE_FILES: u64 = 128;
/// Number of open files per rank: events, replay, and a request to the engine.
const FILES_PER_RANK: u64 = 3;

/// Summary of the configuration and of the resulting workers.
#[derive(Clone, Debug)]
pub struct ConfigSummary {
    /// Path of the configuration file.
    pub file: String,
    /// Number of models.
    pub models: usize,
    /// Number of workers.
    pub workers: usize,
    /// Source of the workers.
    pub source: FleetOrigin,
}

/// Configured source of the workers.
#[derive(Clone, Debug)]
pub enum FleetOrigin {
    /// A workers file.
    File(PathBuf),
    /// DNS names.
    Dns,
    /// Kubernetes pools.
    Kubernetes,
    /// A list in the configuration.
    List,
}

/// State of the tokenizer of a model.
#[derive(Clone, Debug)]
pub enum TokenizerState {
    /// Loaded, with a chat template and the fast path.
    Fast,
    /// Loaded with a chat template, but without the fast path for this reason.
    Slow(String),
    /// Loaded without a chat template.
    WithoutTemplate,
    /// Not configured.
    Unconfigured,
    /// Not loaded, with the error.
    Failed(String),
}

/// Connections that the configuration permits. Each needs an open file.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionDemand {
    /// Number of ext_proc listeners.
    pub listeners: u64,
    /// Maximum number of connections of each listener.
    pub max_connections: u64,
    /// Number of worker ranks.
    pub ranks: u64,
}

/// Checks the configuration as a whole.
pub fn check_config(config: &ConfigSummary) -> Finding {
    let at = FindingBuilder::new("config.read", config.file.as_str());
    if config.workers == 0 {
        return at.error(
            "no workers: Envoy forwards every request without a route",
            missing_workers_fix(&config.source),
        );
    }
    let models = format_count(config.models, "model");
    at.ok(format!(
        "{models}, {}",
        format_count(config.workers, "worker")
    ))
}

fn missing_workers_fix(source: &FleetOrigin) -> String {
    match source {
        FleetOrigin::File(file) => format!("list the engines in {}", file.display()),
        FleetOrigin::Dns => "check that the names under `workers.dns` resolve to \
                addresses"
            .to_owned(),
        FleetOrigin::Kubernetes => {
            "check that pods of the pools are ready, and that warmroute may list them \
                    (`kubectl auth can-i list pods`)"
                .to_owned()
        }
        FleetOrigin::List => "list the engines under `workers`".to_owned(),
    }
}

/// Checks the tokenizer of the model `name`.
pub fn check_tokenizer(name: &str, tokenizer: &TokenizerState) -> Finding {
    let at = FindingBuilder::new("config.tokenizer", format!("model {name}"));
    match tokenizer {
        TokenizerState::WithoutTemplate => at.warning(
            "loaded, but without a chat template (none in tokenizer_config.json, no \
            chat_template.jinja beside it): every chat \
             request is routed by load only",
            "copy chat_template.jinja from the model, or set `chat_template` of the model",
        ),
        TokenizerState::Fast => at.ok("loaded, with the fast path"),
        TokenizerState::Slow(reason) => at.ok(format!(
            "loaded without the fast path, many times slower: {reason}"
        )),
        TokenizerState::Unconfigured => at.warning(
            "no tokenizer: its requests are routed by load only",
            format!(
                "write `tokenizer: ..` and `tokenizer_config: ..` for the model {name}, the files \
                that the engine loads"
            ),
        ),
        TokenizerState::Failed(problem) => at.error(
            format!("it cannot be served exactly: {problem}"),
            format!(
                "set `tokenizer`, `tokenizer_config` and `chat_template` of the model {name} to the \
                files that the engine loads"
            ),
        ),
    }
}

/// Checks the limit of open files against the configured connections; `None` means no limit.
pub fn check_open_files(needs: &ConnectionDemand, limit: Option<u64>) -> Finding {
    let at = FindingBuilder::new("host.files", "this shell");
    let ConnectionDemand {
        listeners,
        max_connections,
        ranks,
    } = *needs;
    let connections = max_connections * listeners;
    let needed = connections + FILES_PER_RANK * ranks + BASE_FILES;
    let Some(limit) = limit else {
        return at.ok(format!("no limit of open files; {needed} may be needed"));
    };
    let finding = format!(
        "{limit} open files; {needed} may be needed for listeners.limits.max_connections: \
        {max_connections} and {ranks} worker ranks"
    );
    if limit >= needed {
        return at.ok(finding);
    }
    let fits = limit.saturating_sub(needed - connections) / listeners.max(1);
    let raised = needed.next_power_of_two();
    at.warning(
        format!("{finding}; beyond the limit connections fail and no events arrive"),
        format!(
            "start warmroute with `ulimit -n {raised}` (`LimitNOFILE={raised}` in a unit), or \
            write `listeners: {{limits: {{max_connections: {fits}}}}}`"
        ),
    )
}

/// Checks that warmroute listens at the configured addresses; `None` means that this is unknown.
pub fn check_listeners(addresses: &[(String, Option<bool>)]) -> Finding {
    let names = |wanted: bool| {
        let found = addresses
            .iter()
            .filter(|(_, listens)| *listens == Some(wanted));
        found
            .map(|(address, _)| address.as_str())
            .collect::<Vec<_>>()
            .join(" and ")
    };
    let at = FindingBuilder::new("warmroute.listens", "warmroute");
    let silent = names(false);
    if silent.is_empty() {
        at.ok(names(true))
    } else {
        at.skipped(format!("not running: {silent} does not accept connections"))
    }
}
