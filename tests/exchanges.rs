//! Transcripts of exchanges: what a gateway sends and what it must get, row by row as the endpoint picker's reference
//! tests and measurements of Envoy have it. Each file of `tests/golden/exchanges` gives a configuration and a script; it is
//! played to a whole process over a socket, and the answers are compared down to the last field. Where we mean to differ
//! from the reference, the file says so and why. `rows.json` names the test of every row.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "exchanges/compare.rs"]
mod compare;
#[path = "exchanges/damage.rs"]
mod damage;
#[path = "exchanges/gateway.rs"]
mod gateway;
#[path = "exchanges/play.rs"]
mod play;
#[path = "exchanges/protocol.rs"]
mod protocol;
#[path = "exchanges/raw.rs"]
mod raw;
#[path = "exchanges/script.rs"]
mod script;
#[path = "exchanges/site.rs"]
mod site;
#[path = "exchanges/table.rs"]
mod table;
#[path = "exchanges/wire.rs"]
mod wire;

use std::fmt::Write as _;

use futures_util::{StreamExt as _, stream};
use play::Played;
use script::Script;
use tokio::sync::OnceCell;

/// A transcript and what came when it was played, or why it could not be.
type Game = (String, Script, Result<Played, String>);

/// Every transcript, played once for all tests.
async fn games() -> &'static [Game] {
    static GAMES: OnceCell<Vec<Game>> = OnceCell::const_new();
    let play_all = || async {
        let scripts = stream::iter(Script::all());
        // Each on its own task, so that one that cannot be played is reported like one that went otherwise.
        let games = scripts.map(|(name, script)| async {
            let task = tokio::spawn({
                let script = script.clone();
                async move { play::play(&script).await }
            });
            (
                name,
                script,
                task.await
                    .map_err(|panicked| format!("could not be played: {panicked}")),
            )
        });
        games.buffered(8).collect().await
    };
    GAMES.get_or_init(play_all).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_exchange_goes_as_its_transcript_says() {
    let (mut report, mut failed) = (String::new(), 0);
    for (name, script, played) in games().await {
        let wrong = match played {
            Ok(played) => played.wrong(script),
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
    assert_eq!(failed, 0, "transcripts that went otherwise:\n{report}");
}
