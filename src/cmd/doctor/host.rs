//! Checks of the configuration, its tokenizers, the limit of open files, and the listeners.

use std::path::Path;
use std::sync::Arc;

use warmroute_core::worker::Worker;
use warmroute_doctor::finding::{CheckVerdict, Finding, error, ok, skipped, warning};
use warmroute_runtime::descriptors::DescriptorDemand;
use warmroute_server::config::{Advice, Config};
use warmroute_server::request::ConfiguredModel;
use warmroute_settings::format_count;

/// Returns the finding for a warning about the configuration.
pub(super) fn advice_finding(advice: Advice) -> Finding {
    warning(advice.finding, advice.fix).about("config.advice", advice.subject)
}

/// Checks the configuration as a whole.
pub(super) fn check_config(file: &Path, config: &Config, workers: &[Worker]) -> Finding {
    let verdict = if workers.is_empty() {
        error(
            "no workers: Envoy forwards every request without a route",
            missing_workers_fix(config),
        )
    } else {
        let models = format_count(config.models.len(), "model");
        let workers = format_count(workers.len(), "worker");
        ok(format!("{models}, {workers}"))
    };
    verdict.about("config.read", file.display().to_string())
}

fn missing_workers_fix(config: &Config) -> String {
    let workers = &config.workers;
    let fix = if let Some(file) = &workers.file {
        return format!("list the engines in {}", file.display());
    } else if !workers.dns.is_empty() {
        "check that the names under `workers.dns` resolve to addresses"
    } else if workers.kubernetes.is_some() {
        "check that pods of the pools are ready, \
        and that warmroute may list them (`kubectl auth can-i list pods`)"
    } else {
        "list the engines under `workers`"
    };
    fix.to_owned()
}

/// Checks the tokenizer of the model `name`.
pub(super) fn check_tokenizer(
    name: &str,
    loaded: &anyhow::Result<Option<Arc<ConfiguredModel>>>,
) -> Finding {
    let verdict = match loaded {
        Ok(model) => judge_encoder(name, model.as_deref()),
        Err(problem) => error(
            format!("it cannot be served exactly: {problem:#}"),
            format!(
                "set `tokenizer`, `tokenizer_config` and `chat_template` of the model {name} \
                to the files that the engine loads"
            ),
        ),
    };
    verdict.about("config.tokenizer", format!("model {name}"))
}

fn judge_encoder(name: &str, model: Option<&ConfiguredModel>) -> CheckVerdict {
    let Some(encoder) = model.and_then(|model| model.encoder.as_ref()) else {
        return warning(
            "no tokenizer: its requests are routed by load only",
            format!(
                "write `tokenizer: ..` and `tokenizer_config: ..` for the model {name}, \
                the files that the engine loads"
            ),
        );
    };
    if !encoder.has_chat_template() {
        return warning(
            "loaded, but without a chat template (none in tokenizer_config.json, \
            no chat_template.jinja beside it): every chat request is routed by load only",
            "copy chat_template.jinja from the model, or set `chat_template` of the model",
        );
    }
    match encoder.enable_fast_path() {
        Ok(()) => ok("loaded, with the fast path"),
        Err(reason) => ok(format!(
            "loaded without the fast path, many times slower: {reason}"
        )),
    }
}

/// Checks the hard limit of open files, to which warmroute raises the soft limit, against the
/// configured connections. `None` means no limit.
pub(super) fn check_open_files(demand: &DescriptorDemand, limit: Option<u64>) -> Finding {
    judge_open_files(demand, limit).about("host.files", "this shell")
}

fn judge_open_files(demand: &DescriptorDemand, limit: Option<u64>) -> CheckVerdict {
    let needed = demand.total();
    let Some(limit) = limit else {
        return ok(format!("no limit of open files; {needed} may be needed"));
    };
    let message = format!(
        "{limit} open files; {needed} may be needed for listeners.limits.max_connections: \
        {} of {} listeners and {} worker ranks",
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
pub(super) fn check_listeners(addresses: &[(String, bool)]) -> Finding {
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
