//! `warmroute audit`: what a running process foresaw, and what came of it.

use std::fmt::Write as _;
use std::io::Write;

use anyhow::Context as _;

use super::pages::{Pages, pretty};
use crate::admin::AUDIT;
use crate::audit::{Cause, ModelTotals, Totals, share};
use crate::cli::AuditArgs;

/// Prints the sums. The value is the exit code.
pub fn run(args: &AuditArgs, out: &mut impl Write) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let pages = Pages::of(
        &args.admin,
        args.token_file.as_deref(),
        args.ca_file.as_deref(),
    )?;
    let text = runtime.block_on(pages.get(AUDIT))?;
    let no_sums = || format!("{} answers no sums; is it another version?", args.admin);
    let text = match args.json {
        true => pretty(&serde_json::from_str(&text).with_context(no_sums)?)?,
        false => render(
            &serde_json::from_str(&text).with_context(no_sums)?,
            args.price,
        ),
    };
    out.write_all(text.as_bytes())?;
    Ok(0)
}

/// The sums for people; `price` is that of a million prompt tokens.
pub fn render(totals: &Totals, price: Option<f64>) -> String {
    let mut text = String::new();
    for (model, sums) in &totals.models {
        let name = if model.is_empty() {
            "(other models)"
        } else {
            model
        };
        _ = writeln!(text, "{name}");
        of_model(&mut text, sums, price);
        text.push('\n');
    }
    if totals.models.is_empty() {
        text += "No answer was looked at yet. What answers say of their cache is seen with `observe: usage` or \
                 `observe: sampled(p)`.\n";
    }
    if totals.waiting > 0 {
        _ = writeln!(text, "{} answers more are looked into.", totals.waiting);
    }
    text
}

fn of_model(text: &mut String, sums: &ModelTotals, price: Option<f64>) {
    let silent = sums.no_usage + sums.no_details + sums.undecided;
    _ = writeln!(
        text,
        "  {} answers said what they found cached, {silent} did not",
        sums.answers
    );
    if sums.no_details > 0 {
        let details =
            "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report";
        _ = writeln!(
            text,
            "    {} had a usage without details: {details}",
            sums.no_details
        );
    }
    if sums.no_usage > 0 {
        let asks = "clients ask for it in streams by stream_options.include_usage";
        _ = writeln!(text, "    {} had no usage: {asks}", sums.no_usage);
    }
    if sums.undecided > 0 {
        let why =
            "another worker computed the prompt, and its response does not pass through warmroute";
        _ = writeln!(text, "    {} are undecided: {why}", sums.undecided);
    }
    if sums.answers == 0 {
        return;
    }
    let by_role: Vec<String> = sums
        .computed_by
        .iter()
        .map(|(role, answers)| format!("{role} {answers}"))
        .collect();
    _ = writeln!(
        text,
        "  prompts computed by workers of the role: {}",
        by_role.join(", ")
    );
    let of_prompt = |tokens| share(tokens, sums.prompt_tokens) * 100.0;
    let mut row = |name: &str, tokens: u64, note: &str| {
        _ = writeln!(
            text,
            "  {name:<44}{tokens:>14}  {:>5.1} %{note}",
            of_prompt(tokens)
        );
    };
    row("prompt tokens", sums.prompt_tokens, "");
    row(
        "found cached: prefill tokens saved",
        sums.delivered_tokens,
        &worth(sums.delivered_tokens, price),
    );
    let more = sums.delivered_tokens.saturating_sub(sums.by_chance_tokens);
    row(
        "  more than workers by chance would have had",
        more,
        &worth(more, price),
    );
    row(
        "cached on the chosen workers, as foreseen",
        sums.captured_tokens,
        "",
    );
    row(
        "cached on the best workers, as foreseen",
        sums.available_tokens,
        "",
    );
    row("missed", sums.missed(), "");
    let mut causes: Vec<(Cause, u64)> = sums
        .missed_tokens
        .iter()
        .map(|(cause, tokens)| (*cause, *tokens))
        .collect();
    causes.sort_by_key(|(_, tokens)| std::cmp::Reverse(*tokens));
    for (cause, tokens) in causes {
        row(
            &format!("  {}", cause.words()),
            tokens,
            &format!(
                "  {:>5.1} % of the missed",
                share(tokens, sums.missed()) * 100.0
            ),
        );
    }
    let foreseen = sums.answers - sums.unforeseen;
    let equal = share(sums.equal, foreseen) * 100.0;
    _ = writeln!(
        text,
        "  came as foreseen: {} of {foreseen} answers ({equal:.1} %)",
        sums.equal
    );
    for (cause, answers) in &sums.errors {
        _ = writeln!(text, "    {answers} did not: {}", cause.words());
    }
    let blocks: Vec<String> = sums
        .error_blocks
        .iter()
        .map(|(blocks, answers)| format!("{blocks:+}: {answers}"))
        .collect();
    _ = writeln!(
        text,
        "  blocks more or less than foreseen, and how many answers: {}",
        blocks.join(", ")
    );
}

fn worth(tokens: u64, price: Option<f64>) -> String {
    price
        .map(|price| format!("  worth {:.2}", tokens as f64 / 1e6 * price))
        .unwrap_or_default()
}
