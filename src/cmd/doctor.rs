//! `warmroute doctor`: is this deployment as its configuration says? Looked at from outside, as a request would meet it:
//! the engines, their events, Envoy, and the machine. Facts are gathered first and judged by pure functions.

pub mod engine;
pub mod envoy;
pub mod finding;
mod gather;
pub mod host;
pub mod table;

use std::collections::HashMap;
use std::io::Write;

use anyhow::Context as _;
use rustix::process::{Resource, getrlimit};
use serde_json::json;

use super::{MISCONFIGURED, load};
use crate::app;
use crate::cli::DoctorArgs;
use crate::config::Config;
use crate::engine_client::EngineClient;
use crate::worker::Worker;
use envoy::dump::Dump;
use envoy::expected::Expected;
use finding::{At, Finding, exit_code};
use gather::Gatherer;

/// Prints what was found. The value is the exit code: 0 all is well, 1 there are warnings, 2 there are errors, or the
/// configuration is one.
pub fn run(args: &DoctorArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let Some(config) = load(&args.config, err)? else { return Ok(MISCONFIGURED) };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let findings = runtime.block_on(examine(&config, args))?;
    let code = exit_code(&findings);
    let text = if args.json {
        serde_json::to_string_pretty(&json!({"exit_code": code, "findings": findings}))? + "\n"
    } else {
        table::render(&findings)
    };
    out.write_all(text.as_bytes())?;
    Ok(code)
}

async fn examine(config: &Config, args: &DoctorArgs) -> anyhow::Result<Vec<Finding>> {
    let workers = app::workers(config).await?;
    let mut findings = vec![host::configuration(&args.config.display().to_string(), config, &workers)];
    findings.extend(config.advice(&workers).into_iter().map(host::advice));
    let mut models = HashMap::new();
    for model in &config.models {
        let loaded = app::model(config, model).await;
        let encoder = loaded.as_ref().map(|loaded| loaded.as_ref().and_then(|model| model.encoder.as_deref()));
        findings.push(host::tokenizer(model, encoder.map_err(|error| format!("{error:#}"))));
        if let Ok(Some(loaded)) = loaded {
            models.insert(model.name.clone(), loaded);
        }
    }
    findings.push(host::files(config, &workers, getrlimit(Resource::Nofile).current));
    findings.push(host::listening(&gather::listening(config, args.patience.into()).await));
    let client = EngineClient::new(&config.engines).context("engines cannot be asked")?;
    let gatherer = Gatherer { config, client, models, patience: args.patience.into(), canaries: !args.no_canary };
    for facts in gatherer.workers(&workers).await {
        findings.extend(engine::examine(&facts));
    }
    findings.extend(envoy(config, args, &workers).await);
    Ok(findings)
}

async fn envoy(config: &Config, args: &DoctorArgs, workers: &[Worker]) -> Vec<Finding> {
    let at = At::new("envoy.admin", "Envoy");
    let configured = || config.envoy.as_ref().and_then(|envoy| envoy.admin.clone());
    let Some(url) = args.envoy_admin.clone().or_else(configured) else {
        let how = "neither --envoy-admin nor `envoy: {admin: ..}` says where its admin page is";
        return vec![at.skipped(how)];
    };
    let page = gather::config_dump(&url, args.envoy_ca_file.as_deref(), args.patience.into()).await;
    let dump = page.and_then(|page| Dump::read(&page).map_err(|problem| format!("{url}/config_dump: {problem}")));
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
