//! Checks of warmroute itself: the configuration, the limit of open files, and its listeners.

use std::path::PathBuf;

use warmroute_runtime::descriptors::DescriptorDemand;
use warmroute_settings::format_count;

use super::finding::{CheckVerdict, Finding, error, ok, skipped, warning};

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
    let verdict = if config.workers == 0 {
        error(
            "no workers: Envoy forwards every request without a route",
            missing_workers_fix(&config.source),
        )
    } else {
        let models = format_count(config.models, "model");
        ok(format!(
            "{models}, {}",
            format_count(config.workers, "worker")
        ))
    };
    verdict.about("config.read", config.file.as_str())
}

fn missing_workers_fix(source: &FleetOrigin) -> String {
    let fix = match source {
        FleetOrigin::File(file) => return format!("list the engines in {}", file.display()),
        FleetOrigin::Dns => "check that the names under `workers.dns` resolve to addresses",
        FleetOrigin::Kubernetes => {
            "check that pods of the pools are ready, and that warmroute may list them (`kubectl \
            auth can-i list pods`)"
        }
        FleetOrigin::List => "list the engines under `workers`",
    };
    fix.to_owned()
}

/// Checks the tokenizer of the model `name`.
pub fn check_tokenizer(name: &str, tokenizer: &TokenizerState) -> Finding {
    let verdict = match tokenizer {
        TokenizerState::WithoutTemplate => warning(
            "loaded, but without a chat template (none in tokenizer_config.json, no \
            chat_template.jinja beside it): every chat request is routed by load only",
            "copy chat_template.jinja from the model, or set `chat_template` of the model",
        ),
        TokenizerState::Fast => ok("loaded, with the fast path"),
        TokenizerState::Slow(reason) => ok(format!(
            "loaded without the fast path, many times slower: {reason}"
        )),
        TokenizerState::Unconfigured => warning(
            "no tokenizer: its requests are routed by load only",
            format!(
                "write `tokenizer: ..` and `tokenizer_config: ..` for the model {name}, the files \
                that the engine loads"
            ),
        ),
        TokenizerState::Failed(problem) => error(
            format!("it cannot be served exactly: {problem}"),
            format!(
                "set `tokenizer`, `tokenizer_config` and `chat_template` of the model {name} to \
                the files that the engine loads"
            ),
        ),
    };
    verdict.about("config.tokenizer", format!("model {name}"))
}

/// Checks the hard limit of open files, to which warmroute raises the soft limit, against the
/// configured connections. `None` means no limit.
pub fn check_open_files(demand: &DescriptorDemand, limit: Option<u64>) -> Finding {
    judge_open_files(demand, limit).about("host.files", "this shell")
}

fn judge_open_files(demand: &DescriptorDemand, limit: Option<u64>) -> CheckVerdict {
    let needed = demand.total();
    let Some(limit) = limit else {
        return ok(format!("no limit of open files; {needed} may be needed"));
    };
    let message = format!(
        "{limit} open files; {needed} may be needed for listeners.limits.max_connections: {} of {} \
        listeners and {} worker ranks",
        demand.max_connections, demand.listeners, demand.ranks
    );
    if limit >= needed {
        return ok(message);
    }
    let fits = demand.max_connections_within(Some(limit));
    warning(
        format!("{message}; warmroute reduces max_connections to {fits}"),
        format!(
            "{}, or write `listeners: {{limits: {{max_connections: {fits}}}}}`",
            demand.fix()
        ),
    )
}

/// Checks that warmroute listens at the configured addresses.
pub fn check_listeners(addresses: &[(String, bool)]) -> Finding {
    let names = |wanted: bool| {
        let found = addresses.iter().filter(|(_, listens)| *listens == wanted);
        let names: Vec<&str> = found.map(|(address, _)| address.as_str()).collect();
        names.join(" and ")
    };
    let silent = names(false);
    let verdict = if silent.is_empty() {
        ok(names(true))
    } else {
        skipped(format!("not running: {silent} does not accept connections"))
    };
    verdict.about("warmroute.listens", "warmroute")
}
