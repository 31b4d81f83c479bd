//! Checks of warmroute itself: the configuration, the limit of open files, and its listeners.

use std::path::PathBuf;

use warmroute_runtime::descriptors::DescriptorDemand;
use warmroute_settings::format_count;

use super::finding::{Finding, FindingBuilder};

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

/// Checks the hard limit of open files, to which warmroute raises the soft limit, against the
/// configured connections. `None` means no limit.
pub fn check_open_files(demand: &DescriptorDemand, limit: Option<u64>) -> Finding {
    let at = FindingBuilder::new("host.files", "this shell");
    let needed = demand.total();
    let Some(limit) = limit else {
        return at.ok(format!("no limit of open files; {needed} may be needed"));
    };
    let finding = format!(
        "{limit} open files; {needed} may be needed for listeners.limits.max_connections: {} of {} \
        listeners and {} worker ranks",
        demand.max_connections, demand.listeners, demand.ranks
    );
    if limit >= needed {
        return at.ok(finding);
    }
    let fits = demand.max_connections_within(Some(limit));
    at.warning(
        format!("{finding}; warmroute reduces max_connections to {fits}"),
        format!(
            "{}, or write `listeners: {{limits: {{max_connections: {fits}}}}}`",
            demand.fix()
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
