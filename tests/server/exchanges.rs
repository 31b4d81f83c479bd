//! Transcripts of exchanges. They contain the messages of a gateway and the expected replies, from
//! the rows of the endpoint picker's reference tests and from measurements of Envoy.
//!
//! Each file in `tests/golden/exchanges` has a configuration and a script. A test plays the script
//! to a whole process over a socket, and compares every field of the replies. The files explain
//! intended differences from the reference. `rows.json` names the test of every row.

mod compare;
mod gateway;
mod play;
mod protocol;
mod raw;
mod script;
mod site;
mod table;
mod wire;

use std::fmt::Write as _;

use futures_util::{StreamExt as _, stream};
use play::PlaybackResult;
use script::ExchangeScript;
use tokio::sync::OnceCell;

/// File name and content of a transcript, with the result of its playback or the error.
type TranscriptRun = (String, ExchangeScript, Result<PlaybackResult, String>);

/// Plays every transcript once for all tests.
async fn played_transcripts() -> &'static [TranscriptRun] {
    static PLAYED: OnceCell<Vec<TranscriptRun>> = OnceCell::const_new();
    let play_all = || async {
        let scripts = stream::iter(ExchangeScript::all());
        // Each transcript has its own task, so that a panic is reported like a mismatch.
        let runs = scripts.map(|(name, script)| async {
            let task = tokio::spawn({
                let script = script.clone();
                async move { Box::pin(play::play(&script)).await }
            });
            (
                name,
                script,
                task.await
                    .map_err(|panicked| format!("could not be played: {panicked}")),
            )
        });
        runs.buffered(8).collect().await
    };
    PLAYED.get_or_init(play_all).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_exchange_matches_its_transcript() {
    let mut report = String::new();
    let mut failed = 0;
    for (name, script, played) in played_transcripts().await {
        let wrong = match played {
            Ok(played) => played.mismatches(script),
            Err(why) => vec![why.clone()],
        };
        let verdict = if wrong.is_empty() { "passed" } else { "FAILED" };
        println!("{verdict}  {name}  {}", script.row);
        if let Some(differs) = &script.differs {
            println!("        differs: {differs}");
        }
        if !wrong.is_empty() {
            failed += 1;
            writeln!(
                report,
                "\n{name} ({}):\n  {}",
                script.row,
                wrong.join("\n  ")
            )
            .unwrap();
        }
    }
    assert_eq!(failed, 0, "failed transcripts:\n{report}");
}
