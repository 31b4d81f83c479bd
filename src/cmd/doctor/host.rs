//! Our own side: the configuration, the files a process may open, and whether somebody listens where Envoy is sent.

use super::finding::{At, Finding};
use crate::config::{Advice, Config, ModelConfig};
use crate::prompt::Encoder;
use crate::worker::Worker;

/// Files of a process beside connections: logs, watches, tokenizers, its own sockets.
const OTHERS: u64 = 128;
/// Of each rank: its events, its replay, and a call to its engine.
const OF_RANK: u64 = 3;

/// The configuration as a whole.
pub fn configuration(file: &str, config: &Config, workers: &[Worker]) -> Finding {
    let at = At::new("config.read", file);
    if workers.is_empty() {
        return at.error(
            "no workers are listed: every request goes where Envoy sends it",
            match &config.workers_file {
                Some(file) => format!("list the engines in {}", file.display()),
                None if !config.dns.is_empty() => "look whether the names under `dns` stand for anybody".to_owned(),
                None if config.kubernetes.is_some() => {
                    "look whether pods of the pools are ready, and whether we may list them (`kubectl auth can-i list pods`)".to_owned()
                }
                None => "list the engines under `workers`".to_owned(),
            },
        );
    }
    at.ok(format!(
        "{} models, {} workers",
        config.models.len(),
        workers.len()
    ))
}

/// What may be said and is hardly meant.
pub fn advice(
    Advice {
        subject,
        seen,
        mend,
    }: Advice,
) -> Finding {
    At::new("config.prefill", subject).warning(seen, mend)
}

/// The tokenizer of one model.
pub fn tokenizer(model: &ModelConfig, loaded: Result<Option<&Encoder>, String>) -> Finding {
    let at = At::new("config.tokenizer", format!("model {}", model.name));
    match loaded {
        Ok(Some(encoder)) if !encoder.has_chat_template() => at.warning(
            "loaded, but without a chat template (none in tokenizer_config.json, no chat_template.jinja beside it): every chat \
             request is routed by load only",
            "copy chat_template.jinja from the model, or set `chat_template` of the model",
        ),
        Ok(Some(encoder)) => match encoder.quicken() {
            Ok(()) => at.ok("loaded, and agrees with the fast way"),
            Err(because) => {
                at.ok(format!("loaded; its texts are tokenised by the library, many times slower: {because}"))
            }
        },
        Ok(None) => at.warning(
            "no tokenizer: its requests go by load, and no cache is ever found",
            format!(
                "write `tokenizer: ..` and `tokenizer_config: ..` for the model {}, the files that the engine loads",
                model.name
            ),
        ),
        Err(problem) => at.error(
            format!("it cannot be served exactly: {problem}"),
            format!(
                "give the model {} the `tokenizer`, `tokenizer_config` and `chat_template` that the engine loads",
                model.name
            ),
        ),
    }
}

/// How many files a process may open, `None` for any number, against what the configuration allows.
pub fn files(config: &Config, workers: &[Worker], limit: Option<u64>) -> Finding {
    let at = At::new("host.files", "this shell");
    let listeners = [config.listen.tcp.is_some(), config.listen.unix.is_some()];
    let listeners = listeners.into_iter().filter(|there| *there).count() as u64;
    let ranks: u64 = workers
        .iter()
        .map(|worker| u64::from(worker.ranks.size.get()))
        .sum();
    let needed = u64::from(config.limits.connections) * listeners + OF_RANK * ranks + OTHERS;
    let Some(limit) = limit else {
        return at.ok(format!("any number of open files; {needed} may be needed"));
    };
    let seen = format!(
        "{limit} open files; {needed} may be needed for limits.connections: {} and {ranks} worker ranks",
        config.limits.connections
    );
    if limit >= needed {
        return at.ok(seen);
    }
    let fits = limit.saturating_sub(needed - u64::from(config.limits.connections) * listeners)
        / listeners.max(1);
    at.warning(
        format!("{seen}; beyond that nobody can connect, and no events come"),
        format!(
            "start warmroute with `ulimit -n {}` (`LimitNOFILE={}` in a unit), or write `limits: {{connections: {fits}}}`",
            needed.next_power_of_two(),
            needed.next_power_of_two()
        ),
    )
}

/// Whether somebody listens where Envoy is sent; `None` where it could not be tried.
pub fn listening(places: &[(String, Option<bool>)]) -> Finding {
    let names = |wanted: bool| {
        let found = places
            .iter()
            .filter(|(_, listens)| *listens == Some(wanted));
        found
            .map(|(place, _)| place.as_str())
            .collect::<Vec<_>>()
            .join(" and ")
    };
    let at = At::new("warmroute.listens", "warmroute");
    let silent = names(false);
    if silent.is_empty() {
        at.ok(names(true))
    } else {
        at.skipped(format!("it does not run: nobody listens at {silent}"))
    }
}
