//! HTML of the overview. All values from outside the process are escaped.

use std::fmt::{self, Display, Write as _};
use std::time::Duration;

use warmroute_core::freshness::IndexFreshness;
use warmroute_settings::format_count;

use super::super::TokenizerKind;
use super::super::html::EscapedText;
use super::overview::{MAX_ROWS, ModelRow, ProcessOverview, WorkerRankRow};

/// Style of the page, for light and dark displays.
const STYLE: &str = include_str!("style.css");

/// Renders the page.
pub(super) fn render(overview: &ProcessOverview) -> String {
    let mut html = String::new();
    // Writing to a string does not fail.
    _ = write_page(&mut html, overview);
    html
}

fn write_page(html: &mut String, overview: &ProcessOverview) -> fmt::Result {
    let (state, class) = readiness(overview);
    write!(
        html,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>warmroute: {state}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header><h1>warmroute</h1> <span class=\"state {class}\">{state}</span></header>\n"
    )?;
    write_process(html, overview)?;
    write_models(html, overview)?;
    write_workers(html, overview)?;
    write_pages(html, overview)?;
    writeln!(
        html,
        "<footer>State at {}. Reload the page for the current state.</footer>\n</body>\n</html>",
        EscapedText(overview.now)
    )
}

/// Returns the readiness of the process in HTML, with its style. A process can be ready while no
/// engine answers.
fn readiness(overview: &ProcessOverview) -> (String, &'static str) {
    if overview.is_draining {
        return ("draining".to_owned(), "warn");
    }
    if !overview.pending.is_empty() {
        return ("not ready".to_owned(), "bad");
    }
    if overview.unreachable == 0 {
        let Some(failing) = overview.failing.first() else {
            return ("ready".to_owned(), "good");
        };
        let kind = if failing.group.is_prefill {
            "prefill worker"
        } else {
            "worker"
        };
        let model = EscapedText(&failing.group.model);
        let text = format!("ready, but no {kind} of {model} delivers answers");
        return (text, "bad");
    }
    let workers = overview.workers;
    let answering = workers.saturating_sub(overview.unreachable);
    let engines = if workers == 1 { "engine" } else { "engines" };
    let class = if answering == 0 { "bad" } else { "warn" };
    let text = format!("ready, but {answering} of {workers} {engines} answer");
    (text, class)
}

fn write_process(html: &mut String, overview: &ProcessOverview) -> fmt::Result {
    let process = &overview.process;
    html.push_str("<section>\n<dl>\n");
    if overview.is_loading() {
        html.push_str("<dt>waiting for</dt><dd>");
        for (index, step) in overview.pending.iter().enumerate() {
            let separator = if index == 0 { "" } else { "<br>" };
            write!(html, "{separator}{}", EscapedText(step))?;
        }
        html.push_str("</dd>\n");
    }
    write_entry(html, "version", process.version.text)?;
    let uptime = overview.now.as_unix_seconds() - process.started_at.as_unix_seconds();
    let uptime = Duration::from_secs(uptime.max(0.0) as u64);
    let started = format!(
        "{} ({} ago)",
        process.started_at,
        humantime::format_duration(uptime)
    );
    write_entry(html, "started", started)?;
    match &process.config_file {
        Some(file) => write_entry(html, "configuration", file.display())?,
        None => write_entry(html, "configuration", "command-line flags, no file")?,
    }
    write_reload(html, overview)?;
    if let Some(pool) = &process.pool {
        write_entry(html, "pool", pool)?;
    }
    let (sources, exact) = overview.event_sources;
    let workers = format!(
        "{} with {}; {}; KV event sources: {exact} of {sources} exact; {}",
        format_count(overview.workers, "worker"),
        format_count(overview.ranks, "rank"),
        format_count(overview.active_requests as usize, "active request"),
        format_count(overview.indexed_blocks as usize, "distinct block") + " indexed",
    );
    write_entry(html, "workers", workers)?;
    html.push_str("</dl>\n</section>\n");
    Ok(())
}

fn write_reload(html: &mut String, overview: &ProcessOverview) -> fmt::Result {
    let process = &overview.process;
    let report = &process.last_reload;
    let (class, outcome) = match report.outcome {
        "started" => ("", "read at startup"),
        "applied" => ("", "reload applied"),
        "unchanged" => ("", "reload: nothing changed"),
        _ => (
            "bad",
            "reload rejected; the previous configuration stays in use",
        ),
    };
    write!(
        html,
        "<dt>last configuration read</dt><dd><span class=\"{class}\">{outcome}</span>, {}, generation {}",
        EscapedText(report.time),
        process.generation
    )?;
    for error in &report.errors {
        write!(html, "<br><code>{}</code>", EscapedText(error))?;
    }
    if !process.needs_restart.is_empty() {
        let keys = process.needs_restart.join(", ");
        write!(
            html,
            "<br><span class=\"warn\">changes that need a restart:</span> <code>{}</code>",
            EscapedText(keys)
        )?;
    }
    html.push_str("</dd>\n");
    Ok(())
}

fn write_entry(html: &mut String, name: &str, value: impl Display) -> fmt::Result {
    writeln!(html, "<dt>{name}</dt><dd>{}</dd>", EscapedText(value))
}

fn write_models(html: &mut String, overview: &ProcessOverview) -> fmt::Result {
    html.push_str(
        "<section>\n<h2>Models</h2>\n<div class=\"table\"><table>\n<thead><tr><th>model</th><th>workers</th>\
         <th>tokens compared with engines</th></tr></thead>\n<tbody>\n",
    );
    for model in &overview.models {
        let by_role: Vec<String> = model
            .workers
            .iter()
            .map(|(role, workers)| format!("{workers} {role}"))
            .collect();
        let workers = match by_role.is_empty() {
            true => "none".to_owned(),
            false => by_role.join(", "),
        };
        let (class, parity) = describe_parity(model, overview.is_loading());
        writeln!(
            html,
            "<tr><td>{}</td><td>{workers}</td><td class=\"{class}\">{parity}</td></tr>",
            EscapedText(&model.name)
        )?;
    }
    html.push_str("</tbody>\n</table></div>\n</section>\n");
    Ok(())
}

/// Describes the token comparison with the engines. Returns the text and its style.
fn describe_parity(model: &ModelRow, is_loading: bool) -> (&'static str, &'static str) {
    match model.tokenizer {
        None if !model.is_configured => {
            return (
                "warn",
                "the model is not configured; requests are routed by load",
            );
        }
        None => {
            return (
                "dim",
                "the model has no tokenizer; requests are routed by load",
            );
        }
        Some(TokenizerKind::Remote) => {
            return ("dim", "not compared: engines or render servers tokenize");
        }
        Some(TokenizerKind::Local) => {}
    }
    match model.parity {
        None if is_loading => ("warn", "the tokenizer is loading"),
        Some("agrees") => ("good", "equal"),
        Some("differs") => ("bad", "different; requests are routed by load"),
        Some("generation_prompt_differs") => ("warn", "generation prompt differs"),
        Some("some_differ") => ("warn", "different on some workers"),
        Some("cannot_test") => ("dim", "not comparable"),
        _ => ("dim", "not compared yet"),
    }
}

fn write_workers(html: &mut String, overview: &ProcessOverview) -> fmt::Result {
    html.push_str("<section>\n<h2>Workers</h2>\n");
    if overview.rows.is_empty() {
        html.push_str("<p>No workers are known.</p>\n</section>\n");
        return Ok(());
    }
    // A column without any value is omitted.
    let has_names = overview.rows.iter().any(|row| row.name.is_some());
    let name_header = if has_names { "<th>name</th>" } else { "" };
    write!(
        html,
        "<div class=\"table\"><table class=\"workers\">\n<thead><tr><th>worker/rank</th>{name_header}\
         <th>state</th><th>KV events</th><th class=\"number\">active requests</th>\
         <th class=\"number\">running + waiting in the engine</th><th class=\"number\">indexed blocks</th>\
         <th>role</th><th>model</th><th>endpoint</th></tr></thead>\n<tbody>\n"
    )?;
    for row in overview.rows.iter().take(MAX_ROWS) {
        write_rank(html, row, has_names)?;
    }
    html.push_str("</tbody>\n</table></div>\n");
    let hidden = overview.rows.len().saturating_sub(MAX_ROWS);
    if hidden > 0 {
        writeln!(
            html,
            "<p>{} not shown. Ranks with a problem come first. \
             <a href=\"/debug/fleet\">/debug/fleet</a> lists all ranks.</p>",
            format_count(hidden, "rank")
        )?;
    }
    html.push_str("</section>\n");
    Ok(())
}

fn write_rank(html: &mut String, row: &WorkerRankRow, has_names: bool) -> fmt::Result {
    write!(html, "<tr><td>{}</td>", EscapedText(row.rank))?;
    if has_names {
        let name = row.name.as_deref().unwrap_or("–");
        write!(html, "<td>{}</td>", EscapedText(name))?;
    }
    match row.states.is_empty() {
        true => html.push_str("<td class=\"good\">eligible</td>"),
        false => write!(
            html,
            "<td class=\"bad\">{}</td>",
            EscapedText(row.states.join("; "))
        )?,
    }
    write_source(html, row)?;
    let engine = row
        .engine_requests
        .map_or("–".to_owned(), |(running, waiting)| {
            format!("{running} + {waiting}")
        });
    let blocks = match row.blocks {
        None => "–".to_owned(),
        Some((device, 0)) => device.to_string(),
        Some((device, lower)) => format!("{device} + {lower} in lower tiers"),
    };
    writeln!(
        html,
        "<td class=\"number\">{}</td><td class=\"number\">{engine}</td><td class=\"number\">{blocks}</td>\
         <td>{}</td><td>{}</td><td>{}</td></tr>",
        row.active_requests,
        row.role,
        EscapedText(&row.model),
        EscapedText(&row.endpoint)
    )
}

/// Writes the state of the event source, with its reason and the time of its last change.
fn write_source(html: &mut String, row: &WorkerRankRow) -> fmt::Result {
    let (class, text) = match (row.freshness, row.stale_reason) {
        (_, Some("no_source")) => ("dim", "none".to_owned()),
        (freshness, None) => ("good", freshness.as_str().to_owned()),
        (freshness, Some(reason)) => {
            let class = match freshness {
                IndexFreshness::Incomplete | IndexFreshness::CatchingUp => "warn",
                _ => "bad",
            };
            (class, format!("{}: {reason}", freshness.as_str()))
        }
    };
    match row.since {
        Some(since) => write!(
            html,
            "<td class=\"{class}\" title=\"since {}\">{text}</td>",
            EscapedText(since)
        ),
        None => write!(html, "<td class=\"{class}\">{text}</td>"),
    }
}

fn write_pages(html: &mut String, overview: &ProcessOverview) -> fmt::Result {
    html.push_str(
        "<section>\n<h2>Pages</h2>\n<div class=\"table\"><table>\n<thead><tr><th>page</th><th>content</th>\
         <th>feature</th></tr></thead>\n<tbody>\n",
    );
    for (page, hint) in &overview.pages {
        let path = match page.method {
            "GET" => format!("<a href=\"{0}\">{0}</a>", page.path),
            method => format!("{method} {}", page.path),
        };
        let content = CodeSpans(page.content);
        write!(html, "<tr><td>{path}</td><td>{content}</td>")?;
        match hint {
            Some(hint) => writeln!(
                html,
                "<td><span class=\"dim\">off</span>: {}</td></tr>",
                CodeSpans(hint)
            )?,
            None if page.hint.is_some() => html.push_str("<td class=\"good\">on</td></tr>\n"),
            None => html.push_str("<td></td></tr>\n"),
        }
    }
    html.push_str("</tbody>\n</table></div>\n</section>\n");
    Ok(())
}

/// Text in which backticks enclose code.
struct CodeSpans(&'static str);

impl Display for CodeSpans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, part) in self.0.split('`').enumerate() {
            match index % 2 {
                0 => write!(f, "{}", EscapedText(part))?,
                _ => write!(f, "<code>{}</code>", EscapedText(part))?,
            }
        }
        Ok(())
    }
}
