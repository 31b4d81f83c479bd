//! `warmroute doctor`: is this deployment as its configuration says? Looked at from outside, as a request would meet it:
//! the engines, their events, Envoy, and the machine. Facts are gathered first and judged by pure functions.

pub mod engine;
pub mod envoy;
pub mod finding;
mod gather;
pub mod host;
pub mod kubernetes;
mod progress;
pub mod table;

use std::collections::HashMap;
use std::io::Write;

use anyhow::Context as _;
use rustix::process::{Resource, getrlimit};
use serde_json::json;

use super::{MISCONFIGURED, load};
use crate::app;
use crate::cli::DoctorArgs;
use crate::config::{Config, WorkerSource};
use crate::discovery::kubernetes::inspect;
use crate::engine_client::EngineClient;
use crate::worker::Worker;
use envoy::dump::Dump;
use envoy::expected::Expected;
use finding::{At, Finding, exit_code};
use gather::Gatherer;
use progress::DoctorProgress;

/// Prints what was found. The value is the exit code: 0 all is well, 1 there are warnings, 2 there are errors, or the
/// configuration is one.
pub fn run(args: &DoctorArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let Some(config) = load(&args.config, err)? else {
        return Ok(MISCONFIGURED);
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let progress = DoctorProgress::default();
    let findings = runtime.block_on(progress.report(examine(&config, args, &progress), err));
    // A name that is still being resolved must not delay the exit.
    runtime.shutdown_background();
    let findings = findings?;
    let code = exit_code(&findings);
    let text = if args.json {
        serde_json::to_string_pretty(&json!({"exit_code": code, "findings": findings}))? + "\n"
    } else {
        table::render(&findings)
    };
    out.write_all(text.as_bytes())?;
    Ok(code)
}

async fn examine(
    config: &Config,
    args: &DoctorArgs,
    progress: &DoctorProgress,
) -> anyhow::Result<Vec<Finding>> {
    let part = progress.open("the workers".to_owned(), "discovery");
    let cluster = match config.worker_source() {
        WorkerSource::Kubernetes(pools) => {
            Some(inspect(&pools, &config.served_models(), args.patience.into()).await)
        }
        _ => None,
    };
    let workers = match &cluster {
        Some(cluster) => cluster.workers.clone(),
        None => app::workers(config).await?,
    };
    drop(part);
    let mut findings = vec![host::configuration(
        &args.config.display().to_string(),
        config,
        &workers,
    )];
    findings.extend(cluster.iter().flat_map(kubernetes::examine));
    findings.extend(config.advice(&workers).into_iter().map(host::advice));
    findings.push(host::files(
        config,
        &workers,
        getrlimit(Resource::Nofile).current,
    ));
    let listening =
        async { host::listening(&gather::listening(config, args.patience.into()).await) };
    let engines = engines(config, args, &workers, progress);
    let (engines, listening, envoy) =
        tokio::join!(engines, listening, envoy(config, args, &workers, progress));
    findings.push(listening);
    findings.extend(engines?);
    findings.extend(envoy);
    Ok(findings)
}

/// The tokenizers, and the engines against them.
async fn engines(
    config: &Config,
    args: &DoctorArgs,
    workers: &[Worker],
    progress: &DoctorProgress,
) -> anyhow::Result<Vec<Finding>> {
    let client =
        EngineClient::new(&config.engines).context("cannot create the client for engines")?;
    let mut findings = Vec::new();
    let mut models = HashMap::new();
    for model in &config.models {
        let _part = progress.open(format!("the model {}", model.name), "tokenizer");
        let loaded = app::model(config, model).await;
        let encoder = loaded
            .as_ref()
            .map(|loaded| loaded.as_ref().and_then(|model| model.encoder.as_deref()));
        findings.push(host::tokenizer(
            model,
            encoder.map_err(|error| format!("{error:#}")),
        ));
        if let Ok(Some(loaded)) = loaded {
            models.insert(model.name.clone(), loaded);
        }
    }
    let patience = args.patience.into();
    let canaries = !args.no_canary;
    let gatherer = Gatherer {
        config,
        client,
        models,
        patience,
        canaries,
        progress: progress.clone(),
    };
    findings.extend(
        gatherer
            .workers(workers)
            .await
            .iter()
            .flat_map(engine::examine),
    );
    Ok(findings)
}

async fn envoy(
    config: &Config,
    args: &DoctorArgs,
    workers: &[Worker],
    progress: &DoctorProgress,
) -> Vec<Finding> {
    let at = At::new("envoy.admin", "Envoy");
    let configured = || config.envoy.as_ref().and_then(|envoy| envoy.admin.clone());
    let Some(url) = args.envoy_admin.clone().or_else(configured) else {
        let how = "neither --envoy-admin nor `envoy: {admin: ..}` says where its admin page is";
        return vec![at.skipped(how)];
    };
    let _part = progress.open(format!("Envoy at {url}"), "/config_dump");
    let page = gather::config_dump(&url, args.envoy_ca_file.as_deref(), args.patience.into()).await;
    let dump = page.and_then(|page| {
        Dump::read(&page).map_err(|problem| format!("{url}/config_dump: {problem}"))
    });
    match dump {
        Ok(dump) => {
            let version = dump.version.as_deref().unwrap_or("of an unknown version");
            let read = at.ok(format!("{url} is an Envoy {version}"));
            std::iter::once(read).chain(envoy::examine(&dump, &Expected::new(config, workers))).collect()
        }
        Err(problem) => vec![at.error(
            problem,
            "start Envoy with an `admin` address, and give that here: --envoy-admin http://127.0.0.1:9900",
        )],
    }
}
