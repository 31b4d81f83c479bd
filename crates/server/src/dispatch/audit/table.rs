//! The audit totals as text.

use std::fmt::Write as _;

use super::{AuditTotals, MissCause, ModelTotals, share};

/// Renders the totals as text. `price` is the price of a million prompt tokens.
pub fn render(totals: &AuditTotals, price: Option<f64>) -> String {
    let mut text = String::new();
    for (model, sums) in &totals.models {
        let name = if model.is_empty() {
            "(other models)"
        } else {
            model
        };
        _ = writeln!(text, "{name}");
        write_model(&mut text, sums, price);
        text.push('\n');
    }
    if totals.models.is_empty() {
        text += "No responses were audited yet. The audit needs the usage of responses: set \
        `gateway.observe: usage` or `sampled(..)`.\n";
    }
    if totals.waiting > 0 {
        _ = writeln!(text, "{} further responses are pending.", totals.waiting);
    }
    text
}

fn write_model(text: &mut String, sums: &ModelTotals, price: Option<f64>) {
    write_coverage(text, sums);
    if sums.responses > 0 {
        write_tokens(text, sums, price);
        write_predictions(text, sums);
    }
}

/// Writes the number of responses with and without reported cached tokens.
fn write_coverage(text: &mut String, sums: &ModelTotals) {
    let unreported = sums.no_usage + sums.no_cached_tokens + sums.undecided;
    _ = writeln!(
        text,
        "  {} responses reported their cached tokens, {unreported} did not",
        sums.responses
    );
    let reasons = [
        (
            sums.no_cached_tokens,
            "had a usage without details: start vLLM with --enable-prompt-tokens-details, SGLang \
             with --enable-cache-report",
        ),
        (
            sums.no_usage,
            "had no usage: in streams, clients request it with stream_options.include_usage",
        ),
        (
            sums.undecided,
            "are undecided: another worker computed the prompt, and its response does not pass \
             through warmroute",
        ),
    ];
    for (count, reason) in reasons.into_iter().filter(|(count, _)| *count > 0) {
        _ = writeln!(text, "    {count} {reason}");
    }
}

/// Writes the prompt tokens: cached, predicted and missed.
fn write_tokens(text: &mut String, sums: &ModelTotals, price: Option<f64>) {
    let by_role: Vec<String> = sums
        .computed_by
        .iter()
        .map(|(role, responses)| format!("{role} {responses}"))
        .collect();
    _ = writeln!(
        text,
        "  prompts computed by workers of the role: {}",
        by_role.join(", ")
    );
    let mut row = |name: &str, tokens: u64, note: &str| {
        let percent = share(tokens, sums.prompt_tokens) * 100.0;
        _ = writeln!(text, "  {name:<44}{tokens:>14}  {percent:>5.1} %{note}");
    };
    row("prompt tokens", sums.prompt_tokens, "");
    let saved = sums.delivered_tokens;
    row(
        "cached: prefill tokens saved",
        saved,
        &format_worth(saved, price),
    );
    let gain = saved.saturating_sub(sums.by_chance_tokens);
    row(
        "  more than with random routing",
        gain,
        &format_worth(gain, price),
    );
    row("predicted on the chosen workers", sums.captured_tokens, "");
    row("predicted on the best workers", sums.available_tokens, "");
    row("missed", sums.missed(), "");
    let mut causes: Vec<(MissCause, u64)> = sums
        .missed_tokens
        .iter()
        .map(|(cause, tokens)| (*cause, *tokens))
        .collect();
    causes.sort_by_key(|(_, tokens)| std::cmp::Reverse(*tokens));
    for (cause, tokens) in causes {
        let percent = share(tokens, sums.missed()) * 100.0;
        row(
            &format!("  {}", cause.description()),
            tokens,
            &format!("  {percent:>5.1} % of the missed"),
        );
    }
}

/// Writes the accuracy of the predictions, and the causes of wrong ones.
fn write_predictions(text: &mut String, sums: &ModelTotals) {
    let predicted = sums.responses - sums.not_predicted;
    let percent = share(sums.equal, predicted) * 100.0;
    _ = writeln!(
        text,
        "  predictions correct: {} of {predicted} responses ({percent:.1} %)",
        sums.equal
    );
    for (cause, responses) in &sums.errors {
        _ = writeln!(text, "    {responses} wrong: {}", cause.description());
    }
    let blocks: Vec<String> = sums
        .error_blocks
        .iter()
        .map(|(blocks, responses)| format!("{blocks:+}: {responses}"))
        .collect();
    _ = writeln!(
        text,
        "  prediction error in blocks, and number of responses: {}",
        blocks.join(", ")
    );
}

fn format_worth(tokens: u64, price: Option<f64>) -> String {
    price
        .map(|price| format!("  worth {:.2}", tokens as f64 / 1e6 * price))
        .unwrap_or_default()
}
