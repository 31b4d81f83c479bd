//! The goals for chats of 220 KB, at which others of the field were seen to stop growing near 130 requests/s: how close
//! warmroute comes to a server that decides nothing, and that it does not get worse the more clients there are.

use crate::bed::Side;
use crate::report::{Measured, Report};

/// Bytes of a chat.
pub(crate) const CHAT: usize = 220_000;
/// Over how many connections they come.
pub(crate) const CONNECTIONS: [usize; 4] = [20, 60, 100, 150];

/// Warm at least 0.8 of the bare server's throughput, so at most so much of its time.
const WARM: f64 = 1.0 / 0.8;
/// Cold at least half of it.
const COLD: f64 = 2.0;
/// What two measurements of the same differ by.
const NOISE: f64 = 1.1;
/// What warmroute may keep: its prompt cache, half as much again for what allocators hold back, and the process itself.
const MEMORY_MIB: f64 = 256.0 * 1.5 + 128.0;
/// And for each request in flight its body, its text, its tokens and their hashes.
const MEMORY_PER_BODY: f64 = 8.0;

/// Enters the rows.
pub(crate) fn enter(chats: &[Measured], report: &mut Report) {
    for chat in chats {
        // A request that was routed by load only is not one that was done.
        let micros = |side| {
            chat.of(side)
                .iter()
                .map(|sample| sample.micros_apart())
                .collect::<Vec<_>>()
        };
        let goal = if is_warm(chat) { WARM } else { COLD };
        let measure = format!("{}: time per request", chat.case.name);
        report.table.enter(
            (&measure, "µs", Some(goal)),
            &micros(Side::Bare),
            &micros(Side::Ours),
        );
    }
    for warm in [false, true] {
        let mut chats = chats.iter().filter(|chat| is_warm(chat) == warm);
        let (Some(few), Some(many)) = (chats.next(), chats.next_back()) else {
            continue;
        };
        // Of the whole time, not of what is added: that is the small difference of two large numbers, and may be none.
        let growth = |side| many.middle(side).p50_ms / few.middle(side).p50_ms;
        let measure = format!("{} over {}: p50", many.case.name, few.case.name);
        report.table.enter(
            (&measure, "x", Some(NOISE)),
            &[growth(Side::Bare)],
            &[growth(Side::Ours)],
        );
    }
    let peak = |chat: &Measured| chat.middle(Side::Ours).peak_server_mib;
    let Some(most) = chats.iter().map(peak).reduce(f64::max) else {
        return;
    };
    let connections = CONNECTIONS.iter().max().copied().unwrap_or(0) as f64;
    let bound = MEMORY_MIB + connections * CHAT as f64 * MEMORY_PER_BODY / f64::from(1 << 20);
    report.table.enter(
        (
            "220 KB chat: peak memory against its bound",
            "MiB",
            Some(1.0),
        ),
        &[bound],
        &[most],
    );
}

fn is_warm(chat: &Measured) -> bool {
    chat.case.at["warm"] == true
}
