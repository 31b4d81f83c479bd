//! `warmroute explain`: why would this request go where it would go? With `--admin` a running process is asked, which
//! knows the caches and the load; without, the configuration alone shows how the request is read, who is eligible and
//! what everything costs while nothing is cached and nobody is busy.

use std::collections::BTreeMap;
use std::io::{Read as _, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::{MISCONFIGURED, load};
use crate::admin::explain::{PAGE, Question, table};
use crate::app::Offline;
use crate::cli::ExplainArgs;
use crate::config::Config;
use crate::intake::Body;
use crate::router::Explanation;

/// How long a running process may take; a long prompt on a busy one takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

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
    let question = Question::new(args.path.clone(), headers, body(&args.body)?)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let text = match (&args.admin, config) {
        (Some(admin), _) => runtime.block_on(ask(admin, &question, args))?,
        (None, Some(config)) => {
            let explanation = runtime.block_on(offline(&config, &question))?;
            if args.json { pretty(&serde_json::to_value(&explanation)?)? } else { offline_table(&explanation) }
        }
        (None, None) => bail!("either --config or --admin is needed"),
    };
    out.write_all(text.as_bytes())?;
    Ok(0)
}

fn body(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path != Path::new("-") {
        return std::fs::read(path).with_context(|| format!("the body {} cannot be read", path.display()));
    }
    let mut body = Vec::new();
    std::io::stdin().read_to_end(&mut body).context("standard input cannot be read")?;
    Ok(body)
}

/// What a running process says, as text for people or as JSON.
async fn ask(admin: &str, question: &Question, args: &ExplainArgs) -> anyhow::Result<String> {
    if admin.starts_with("https:") {
        anyhow::bail!(
            "pages with TLS cannot be asked by this command; ask them with a client that knows your authority"
        );
    }
    let json = args.json;
    // The process is an operator's own; a proxy has no business between.
    let client = crate::tls::client().timeout(PATIENCE).build()?;
    let url = format!("{}{PAGE}", admin.trim_end_matches('/'));
    let mut request = client
        .post(&url)
        .header("content-type", "application/json")
        .header("accept", if json { "application/json" } else { "text/plain" })
        .body(serde_json::to_string(question)?);
    if let Some(file) = &args.token_file {
        let token = std::fs::read_to_string(file).with_context(|| format!("the token {}", file.display()))?;
        request = request.bearer_auth(token.trim());
    }
    let answer = request.send().await.with_context(|| format!("{url} cannot be reached"))?;
    let status = answer.status();
    let text = answer.text().await.with_context(|| format!("{url} broke off its answer"))?;
    if !status.is_success() {
        let said = serde_json::from_str::<Value>(&text).ok().and_then(|said| Some(said["error"].as_str()?.to_owned()));
        bail!("{url} answers {status}: {}", said.unwrap_or(text));
    }
    if json {
        pretty(&serde_json::from_str(&text).with_context(|| format!("{url} answers no JSON"))?)
    } else {
        Ok(text)
    }
}

async fn offline(config: &Config, question: &Question) -> anyhow::Result<Explanation> {
    let parts = Offline::new(config).await?;
    let body = question.body()?.unwrap_or_default();
    let (path, headers) = (question.path_for(&body).to_owned(), |name: &str| question.header(name));
    let taken = match Question::seen(body, config.limits.body.bytes()) {
        // Nobody waits for it but the operator: without a deadline.
        Body::Whole(body) => parts.intake.take_now(&path, &headers, &body),
        other => parts.intake.take(&path, &headers, &other).await,
    };
    Ok(parts.entrance.explain(taken.request, taken.session.as_ref()))
}

fn offline_table(explanation: &Explanation) -> String {
    let note = "Without --admin nothing is cached and nobody is busy.";
    format!("{}{note}\n", table::render(explanation))
}

fn pretty(value: &Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
