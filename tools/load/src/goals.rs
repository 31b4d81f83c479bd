//! The goals for chats of 220 KB, at which other routers saturate near 130 requests/s. They compare
//! warmroute's throughput with that of the bare server. It must not drop as clients are added.

use warmroute_testbed::comparison::ComparedMeasure;

use crate::case::MeasuredCase;
use crate::report::LoadReport;
use crate::setups::SetupKind;

/// Bytes of a chat.
pub const CHAT_BYTES: usize = 220_000;
/// Numbers of connections.
pub(crate) const CONNECTIONS: [usize; 4] = [20, 60, 100, 150];

/// Warm prompts: at least 0.8 of the bare server's throughput, so at most this multiple of its
/// time.
const WARM: f64 = 1.0 / 0.8;
/// Cold prompts: at least half of the bare server's throughput.
const COLD: f64 = 2.0;
/// Tolerance between two measurements of the same case.
const NOISE: f64 = 1.1;
/// Memory limit: the prompt cache with half of its size for allocator overhead, and the process
/// itself.
const MEMORY_MIB: f64 = 256.0 * 1.5 + 128.0;
/// Memory limit per byte of a body in flight. It covers the body, its text, its tokens and their
/// hashes.
const MEMORY_PER_BODY: f64 = 8.0;

/// Adds the rows of the goals.
pub(crate) fn add_goals(chats: &[MeasuredCase], report: &mut LoadReport) {
    for chat in chats {
        // A request that was routed by load only does not count as completed.
        let micros = |kind| {
            chat.rounds_of(kind)
                .iter()
                .map(|sample| sample.micros_apart())
                .collect::<Vec<_>>()
        };
        let goal = if is_warm(chat) { WARM } else { COLD };
        let measure = format!("{}: time per request", chat.case.name);
        report.table.add(
            ComparedMeasure::new(&measure, "µs", Some(goal)),
            &micros(SetupKind::BareServer),
            &micros(SetupKind::Warmroute),
        );
    }
    for warm in [false, true] {
        let mut chats = chats.iter().filter(|chat| is_warm(chat) == warm);
        let (Some(few), Some(many)) = (chats.next(), chats.next_back()) else {
            continue;
        };
        // The ratio compares total times. The added time is a small difference of two large numbers
        // and may be zero.
        let growth = |kind| many.median(kind).p50_ms / few.median(kind).p50_ms;
        let measure = format!("{} over {}: p50", many.case.name, few.case.name);
        report.table.add(
            ComparedMeasure::new(&measure, "x", Some(NOISE)),
            &[growth(SetupKind::BareServer)],
            &[growth(SetupKind::Warmroute)],
        );
    }
    let peak = |chat: &MeasuredCase| chat.median(SetupKind::Warmroute).peak_server_mib;
    let Some(most) = chats.iter().map(peak).reduce(f64::max) else {
        return;
    };
    let connections = CONNECTIONS.iter().max().copied().unwrap_or(0) as f64;
    let bound = MEMORY_MIB + connections * CHAT_BYTES as f64 * MEMORY_PER_BODY / f64::from(1 << 20);
    report.table.add(
        ComparedMeasure::new(
            "220 KB chat: peak memory against its bound",
            "MiB",
            Some(1.0),
        ),
        &[bound],
        &[most],
    );
}

fn is_warm(chat: &MeasuredCase) -> bool {
    chat.case.point["warm"] == true
}
