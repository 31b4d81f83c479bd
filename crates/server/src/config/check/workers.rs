//! Checks of the sources of workers.

use warmroute_settings::{Problem, all_within};

use super::steps;
use crate::config::Config;
use crate::fleet::discovery;
use crate::fleet::discovery::config::WorkerConfig;
use crate::fleet::discovery::dns::DnsConfig;
use crate::fleet::discovery::kubernetes::PodsConfig;
use warmroute_settings::describe_missing_file;

/// Returns the problems of the sources of workers.
pub(super) fn workers(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    let sources = [
        ("list", config.workers.list.is_some()),
        ("file", config.workers.file.is_some()),
        ("dns", !config.workers.dns.is_empty()),
        ("kubernetes", config.workers.kubernetes.is_some()),
    ];
    let given: Vec<&str> = sources
        .into_iter()
        .filter(|(_, is_given)| *is_given)
        .map(|(key, _)| key)
        .collect();
    match (&given[..], &config.workers.list) {
        ([], _) => {
            let text = "there is no source of workers; give one of `workers.file`, `workers.list`, \
                `workers.dns` and `workers.kubernetes`";
            problems.push(Problem::at([], text));
        }
        ([first, second, ..], _) => {
            let text = format!("`workers.{first}` and `workers.{second}` are both given; keep one");
            problems.push(Problem::of(first, text).within("workers"));
        }
        (_, Some(list)) if list.is_empty() => {
            let text = "the list is empty; list at least one worker or name a `workers.file`";
            problems.push(Problem::at(steps("workers.list"), text));
        }
        (_, Some(list)) if list.len() < config.process.readiness.min_workers as usize => {
            let text = format!(
                "readiness waits for {} workers but the list has {}, so it would never come; lower \
                this or list more",
                config.process.readiness.min_workers,
                list.len()
            );
            problems.push(Problem::at(steps("process.readiness.min_workers"), text));
        }
        _ => {}
    }
    if config.models.is_empty() {
        // Without models, every worker would also be reported for its unknown model.
        return problems;
    }
    let found = config.fixed_workers().err().unwrap_or_default();
    problems.extend(all_within("workers", all_within("list", found)));
    problems.extend(source_problems(config));
    problems
}

/// Returns the problems of the DNS and Kubernetes sources, and those of a sample worker of each.
fn source_problems(config: &Config) -> Vec<Problem> {
    let models = config.served_models();
    let sample_problems = |sample: &WorkerConfig| {
        let found = discovery::resolve(std::slice::from_ref(sample), &models)
            .err()
            .unwrap_or_default();
        let within = |mut problem: Problem| {
            // The sample is a list with one element; its index is not part of the path.
            problem.path.remove(0);
            problem.within("worker")
        };
        found.into_iter().map(within).collect::<Vec<_>>()
    };
    let name_problems = |(at, name): (usize, &DnsConfig)| {
        let problems = name.problems().into_iter();
        all_within(at, problems.chain(sample_problems(&name.sample_worker())))
    };
    let names = config.workers.dns.iter().enumerate();
    let found = all_within("dns", names.flat_map(name_problems));
    let mut problems: Vec<Problem> = all_within("workers", found).collect();
    let Some(kubernetes) = &config.workers.kubernetes else {
        return problems;
    };
    let pool_problems =
        |(at, pool): (usize, &PodsConfig)| all_within(at, sample_problems(&pool.sample_worker()));
    let pools = kubernetes.pools.iter().enumerate();
    let pools = all_within("pools", pools.flat_map(pool_problems));
    let found = all_within("kubernetes", kubernetes.problems().into_iter().chain(pools));
    problems.extend(all_within("workers", found));
    problems
}

/// Returns the problems of the path of the workers file.
pub(super) fn files(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(file) = &config.workers.file {
        if !file.is_file() {
            problems.push(Problem::at(
                steps("workers.file"),
                describe_missing_file(file),
            ));
        }
        if config
            .envoy
            .as_ref()
            .is_some_and(|envoy| envoy.endpoints_file.as_ref() == Some(file))
        {
            let text =
                "this is the `workers.file`, which would be overwritten; choose another name";
            problems.push(Problem::at(steps("envoy.endpoints_file"), text));
        }
    }
    problems
}
