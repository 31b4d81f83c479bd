//! `warmroute explain`: why would this request go where it would go? With `--admin` a running process is asked, which
//! knows the caches and the load; without, the configuration alone shows how the request is read, who is eligible and
//! what everything costs while nothing is cached and nobody is busy.

use std::collections::BTreeMap;
use std::io::{Read as _, Write};
use std::path::Path;

use anyhow::{Context as _, bail};

use super::pages::{Pages, pretty};
use super::{MISCONFIGURED, load};
use crate::admin::explain::{PAGE, Question, table};
use crate::app::Offline;
use crate::cli::ExplainArgs;
use crate::config::Config;
use crate::intake::Body;
use crate::router::Explanation;

/// Prints the explanation. The value is the exit code.
pub fn run(args: &ExplainArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let config = match &args.config {
        Some(path) => match load(path, err)? {
            Some(config) => Some(config),
            None => return Ok(MISCONFIGURED),
        },
        None => None,
    };
    let headers: BTreeMap<String, String> = args.headers.iter().cloned().collect();
    let question = Question {
        pool: args.pool.clone(),
        ..Question::new(args.path.clone(), headers, body(&args.body)?)?
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let text = match (&args.admin, config) {
        (Some(admin), _) => runtime.block_on(ask(admin, &question, args))?,
        (None, Some(config)) => {
            let explanation = runtime.block_on(offline(&config, &question))?;
            if args.json {
                pretty(&serde_json::to_value(&explanation)?)?
            } else {
                offline_table(&explanation)
            }
        }
        (None, None) => bail!("either --config or --admin is needed"),
    };
    out.write_all(text.as_bytes())?;
    Ok(0)
}

fn body(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path != Path::new("-") {
        return std::fs::read(path)
            .with_context(|| format!("the body {} cannot be read", path.display()));
    }
    let mut body = Vec::new();
    std::io::stdin()
        .read_to_end(&mut body)
        .context("standard input cannot be read")?;
    Ok(body)
}

/// What a running process says, as text for people or as JSON.
async fn ask(admin: &str, question: &Question, args: &ExplainArgs) -> anyhow::Result<String> {
    let pages = Pages::of(admin, args.token_file.as_deref(), args.ca_file.as_deref())?;
    let accept = if args.json {
        "application/json"
    } else {
        "text/plain"
    };
    let text = pages
        .post(PAGE, serde_json::to_string(question)?, accept)
        .await?;
    if args.json {
        pretty(&serde_json::from_str(&text).with_context(|| format!("{admin} answers no JSON"))?)
    } else {
        Ok(text)
    }
}

async fn offline(config: &Config, question: &Question) -> anyhow::Result<Explanation> {
    let parts = Offline::new(config).await?;
    let body = question.body()?.unwrap_or_default();
    let (path, headers) = (question.path_for(&body).to_owned(), |name: &str| {
        question.header(name)
    });
    let pool = question.pool_for(&parts.intake, &path);
    let seen = Question::seen(body, config.limits.body.bytes());
    let (body, requested_model) = question.rewrite(&parts.intake, pool.as_deref(), seen);
    let taken = match body {
        // Only the operator waits, so there is no deadline.
        Body::Whole(body) => parts.intake.take_now(pool, &path, &headers, &body),
        other => parts.intake.take_for(pool, &path, &headers, &other).await,
    };
    let explanation = parts
        .entrance
        .explain(taken.request, taken.session.as_ref());
    Ok(Explanation {
        requested_model,
        ..explanation
    })
}

fn offline_table(explanation: &Explanation) -> String {
    let note = "Without --admin nothing is cached and nobody is busy.";
    format!("{}{note}\n", table::render(explanation))
}
