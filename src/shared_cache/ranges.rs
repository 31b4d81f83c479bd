//! From the ranges a cache answers with to ranges one can count with.

use std::ops::Range;

/// Sorts ranges, cuts them at the end of the prompt, and joins what overlaps or touches; the first range that ends before
/// it starts is the error.
pub(super) fn normalized(
    answered: &[(u64, u64)],
    blocks: u32,
) -> Result<Vec<Range<u32>>, (u64, u64)> {
    if let Some(&backwards) = answered.iter().find(|(start, end)| start > end) {
        return Err(backwards);
    }
    let cut = |block: u64| u32::try_from(block).unwrap_or(u32::MAX).min(blocks);
    let mut sorted: Vec<Range<u32>> = answered
        .iter()
        .map(|&(start, end)| cut(start)..cut(end))
        .collect();
    sorted.retain(|range| !range.is_empty());
    sorted.sort_unstable_by_key(|range| range.start);
    sorted.dedup_by(|next, kept| {
        let joins = next.start <= kept.end;
        if joins {
            kept.end = kept.end.max(next.end);
        }
        joins
    });
    Ok(sorted)
}
