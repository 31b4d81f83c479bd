//! `warmroute audit`: compares predicted and actual cache hits of a running process.

use std::io::Write;

use anyhow::Context as _;
use warmroute_server::admin::AUDIT_PATH;
use warmroute_server::dispatch::audit::table;

use super::admin_client::{AdminClient, pretty_json};
use crate::cmd::cli::AuditArgs;

/// Prints the totals of the audit and returns the exit code.
pub fn run(args: &AuditArgs, out: &mut impl Write) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let client = AdminClient::new(
        &args.admin,
        args.token_file.as_deref(),
        args.ca_file.as_deref(),
    )?;
    let text = runtime.block_on(client.get(AUDIT_PATH))?;
    let no_totals = || {
        format!(
            "{} returned no audit totals; is it a different version of warmroute?",
            args.admin
        )
    };
    let text = if args.json {
        pretty_json(&serde_json::from_str(&text).with_context(no_totals)?)?
    } else {
        table::render(
            &serde_json::from_str(&text).with_context(no_totals)?,
            args.price,
        )
    };
    out.write_all(text.as_bytes())?;
    Ok(0)
}
