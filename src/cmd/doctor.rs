//! `warmroute doctor`: verifies a deployment against its configuration from outside: the engines,
//! their KV events, Envoy, and the machine. This module collects the facts, and checks the
//! configuration, the host and the running process. [`warmroute_doctor`] checks the others.

mod collect;
mod host;
mod inputs;
mod probes;
mod process;
mod progress;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io::Write;

use anyhow::Context as _;
use serde_json::json;
use warmroute_core::worker::Worker;
use warmroute_doctor::envoy::counters::check_counters;
use warmroute_doctor::finding::{CheckVerdict, Finding, error, exit_code, ok, skipped};
use warmroute_doctor::{engine, envoy, kubernetes, table};
use warmroute_engines::engine_client::EngineClient;
use warmroute_runtime::descriptors;

use super::load_config;
use crate::cmd::cli::DoctorArgs;
use crate::discovery::load_workers;
use crate::kubernetes::inspect;
use collect::FactCollector;
use probes::EnvoyAdminClient;
use progress::DoctorProgress;
use warmroute_server::app;
use warmroute_server::config::{Config, WorkerSource};
use warmroute_server::serve::EXIT_MISCONFIGURED;

/// Prints the findings. Returns the exit code: 0 ok, 1 warnings, 2 errors or an invalid
/// configuration.
pub fn run(args: &DoctorArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let Some(config) = load_config(args.config_file(), err)? else {
        return Ok(EXIT_MISCONFIGURED);
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let progress = DoctorProgress::default();
    let findings = runtime.block_on(progress.report(run_checks(&config, args, &progress), err));
    // A pending name resolution on the blocking pool must not delay the exit.
    runtime.shutdown_background();
    let findings = findings?;
    let code = exit_code(&findings);
    let text = if args.json {
        serde_json::to_string_pretty(&json!({"exit_code": code, "findings": findings}))? + "\n"
    } else {
        table::render(&findings, args.verbose)
    };
    out.write_all(text.as_bytes())?;
    Ok(code)
}

async fn run_checks(
    config: &Config,
    args: &DoctorArgs,
    progress: &DoctorProgress,
) -> anyhow::Result<Vec<Finding>> {
    let part = progress.open("worker discovery".to_owned(), "discovery");
    let cluster = match config.worker_source() {
        WorkerSource::Kubernetes(pools) => {
            Some(inspect(&pools, &config.served_models(), args.timeout.into()).await)
        }
        _ => None,
    };
    let workers = match &cluster {
        Some(cluster) => cluster.workers.clone(),
        None => load_workers(config).await?,
    };
    drop(part);
    let file = args.config_file();
    let mut findings = vec![host::check_config(file, config, &workers)];
    if let Some(cluster) = &cluster {
        findings.extend(kubernetes::check_pools(&cluster.pools, &cluster.conflicts));
    }
    let advice = config.advice(&workers).into_iter();
    findings.extend(advice.map(host::advice_finding));
    findings.push(host::check_open_files(
        &app::descriptor_demand(config, &workers),
        descriptors::hard_limit(),
    ));
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let running = async {
        let timeout = args.timeout.into();
        let listeners = probes::probe_listeners(config, timeout).await;
        let listens = listeners.iter().any(|(_, listens)| *listens);
        let process =
            process::check_process(config, &file.display().to_string(), timeout, listens).await;
        (host::check_listeners(&listeners), process)
    };
    let engines = check_engines(config, args, &workers, progress);
    let (engines, (listening, process), envoy) = tokio::join!(
        engines,
        running,
        check_envoy(config, args, &workers, progress)
    );
    findings.push(listening);
    findings.extend(process);
    findings.extend(engines?);
    findings.extend(envoy);
    Ok(findings)
}

/// Checks the tokenizers and the engines.
async fn check_engines(
    config: &Config,
    args: &DoctorArgs,
    workers: &[Worker],
    progress: &DoctorProgress,
) -> anyhow::Result<Vec<Finding>> {
    let client =
        EngineClient::new(&config.engines.http).context("cannot create the client for engines")?;
    let mut findings = Vec::new();
    let mut models = HashMap::new();
    for model in &config.models {
        let _part = progress.open(format!("model {}", model.name), "tokenizer");
        let loaded = app::load_model(config, model).await;
        findings.push(host::check_tokenizer(model.name.as_str(), &loaded));
        if let Ok(Some(loaded)) = loaded {
            models.insert(model.name.clone(), loaded);
        }
    }
    let collector = FactCollector {
        config,
        workers,
        client,
        models,
        timeout: args.timeout.into(),
        sends_canaries: !args.no_canary,
        progress: progress.clone(),
    };
    findings.extend(
        collector
            .collect_workers()
            .await
            .iter()
            .flat_map(engine::check_worker),
    );
    Ok(findings)
}

/// Checks Envoy's configuration, if its admin address is known.
async fn check_envoy(
    config: &Config,
    args: &DoctorArgs,
    workers: &[Worker],
    progress: &DoctorProgress,
) -> Vec<Finding> {
    let about = |verdict: CheckVerdict| verdict.about("envoy.admin", "Envoy");
    let configured = config.envoy.as_ref();
    let configured = configured.and_then(|envoy| envoy.admin_url.as_ref());
    let Some(url) = args.envoy_admin.as_ref().or(configured) else {
        let reason = "no admin address: set --envoy-admin or `envoy: {admin_url: ..}`";
        return vec![about(skipped(reason))];
    };
    let _part = progress.open(format!("Envoy at {url}"), "/config_dump");
    let state = async {
        let ca_file = args.envoy_ca_file.as_deref();
        let client = EnvoyAdminClient::new(url, ca_file, args.timeout.into())?;
        client.fetch_state().await
    };
    match state.await {
        Ok((dump, samples)) => {
            let version = dump.version.as_deref().unwrap_or("of an unknown version");
            let expected = inputs::expected_envoy(config, workers);
            let mut findings = vec![about(ok(format!("{url} is an Envoy {version}")))];
            findings.extend(envoy::check_envoy(&dump, &expected));
            findings.extend(check_counters(&dump, &expected, &samples));
            findings
        }
        Err(problem) => vec![about(error(
            problem,
            "start Envoy with an `admin` address, \
            and pass it with --envoy-admin http://127.0.0.1:9900",
        ))],
    }
}
