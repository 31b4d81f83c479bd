//! `warmroute explain`: explains the route of a request. With `--admin` it queries a running
//! process, which knows the caches and the load. Without it, the explanation follows from the
//! configuration alone: how the request is parsed, which workers are eligible, and their costs with
//! empty caches and no load.

use std::collections::BTreeMap;
use std::io::{Read as _, Write};
use std::path::Path;

use anyhow::{Context as _, bail};
use serde::de::IgnoredAny;
use thiserror::Error;
use warmroute_core::router::RouteExplanation;
use warmroute_server::admin::explain::{EXPLAIN_PATH, ExplainRequest};
use warmroute_server::app::OfflineRouter;
use warmroute_server::config::Config;
use warmroute_server::request::RequestBody;
use warmroute_server::serve::EXIT_MISCONFIGURED;

use super::admin_client::{AdminClient, pretty_json};
use super::load_config;
use crate::cmd::cli::ExplainArgs;
use crate::discovery::load_workers;

/// Prints the explanation and returns the exit code.
pub fn run(args: &ExplainArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let config = match &args.config {
        Some(path) => match load_config(path, err)? {
            Some(config) => Some(config),
            None => return Ok(EXIT_MISCONFIGURED),
        },
        None => None,
    };
    if args.admin.is_none() && config.is_none() {
        bail!(ExplainSourceError);
    }
    let headers: BTreeMap<String, String> = args.headers.iter().cloned().collect();
    let body = read_body(&args.body)?;
    let json_error = json_error(&body, &headers);
    let request = ExplainRequest {
        pool: args.pool.clone(),
        table: args.table,
        ..ExplainRequest::new(args.path.clone(), headers, body)?
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let text = match (&args.admin, config) {
        (Some(admin), _) => runtime.block_on(query_process(admin, &request, args))?,
        (None, Some(config)) => {
            let explanation = runtime.block_on(explain_offline(&config, &request))?;
            if args.json {
                pretty_json(&serde_json::to_value(&explanation)?)?
            } else {
                format!(
                    "{}Without --admin, caches are empty and workers have no load.\n",
                    request.render(&explanation)
                )
            }
        }
        (None, None) => bail!(ExplainSourceError),
    };
    out.write_all(text.as_bytes())?;
    let Some(error) = json_error else {
        return Ok(0);
    };
    writeln!(err, "warmroute: the body is not JSON: {error}")?;
    Ok(1)
}

/// Returns the JSON error of a body that must be JSON.
fn json_error(body: &[u8], headers: &BTreeMap<String, String>) -> Option<serde_json::Error> {
    let is_form = headers
        .get("content-type")
        .is_some_and(|kind| kind.starts_with("multipart/"));
    if is_form || body.is_empty() {
        return None;
    }
    serde_json::from_slice::<IgnoredAny>(body).err()
}

fn read_body(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path != Path::new("-") {
        return std::fs::read(path)
            .with_context(|| format!("cannot read the body {}", path.display()));
    }
    let mut body = Vec::new();
    std::io::stdin()
        .read_to_end(&mut body)
        .context("cannot read standard input")?;
    Ok(body)
}

/// Queries a running process for the explanation, as text or JSON.
async fn query_process(
    admin: &str,
    request: &ExplainRequest,
    args: &ExplainArgs,
) -> anyhow::Result<String> {
    let client = AdminClient::new(admin, args.token_file.as_deref(), args.ca_file.as_deref())?;
    let accept = if args.json {
        "application/json"
    } else {
        "text/plain"
    };
    let text = client
        .post(EXPLAIN_PATH, serde_json::to_string(request)?, accept)
        .await?;
    if args.json {
        pretty_json(
            &serde_json::from_str(&text).with_context(|| format!("{admin} did not return JSON"))?,
        )
    } else {
        Ok(text)
    }
}

async fn explain_offline(
    config: &Config,
    request: &ExplainRequest,
) -> anyhow::Result<RouteExplanation> {
    let offline = OfflineRouter::new(config, load_workers(config).await?).await?;
    let body = request.body()?.unwrap_or_default();
    let path = request.resolve_path(&body).to_owned();
    let headers = |name: &str| request.header(name);
    let pool = request.resolve_pool(&offline.preprocessor, &path);
    let body = ExplainRequest::to_body(body, config.requests.limits.max_body_size.bytes());
    let (body, requested_model) =
        request.rewrite_model(&offline.preprocessor, pool.as_deref(), body);
    let preprocessed = match body {
        // No request waits for the result, so no deadline applies.
        RequestBody::Whole(body) => offline
            .preprocessor
            .preprocess_blocking(pool, &path, &headers, &body),
        other => {
            offline
                .preprocessor
                .preprocess_for_pool(pool, &path, &headers, &other)
                .await
        }
    };
    let explanation = offline
        .dispatcher
        .explain(preprocessed.route_request, preprocessed.session.as_ref());
    Ok(RouteExplanation {
        requested_model,
        ..explanation
    })
}

/// Error for a command line that names neither a process nor a file.
#[derive(Debug, Error)]
#[error("set --admin URL (running process) or --config FILE (offline)")]
pub struct ExplainSourceError;
