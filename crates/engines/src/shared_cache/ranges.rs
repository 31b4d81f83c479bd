//! Normalization of the ranges in a response.

use std::ops::Range;

/// Sorts ranges, truncates them at the end of the prompt, and merges overlapping and adjacent ones.
/// Returns the first range that ends before it starts as the error.
pub(super) fn normalize_ranges(
    ranges: &[(u64, u64)],
    blocks: u32,
) -> Result<Vec<Range<u32>>, (u64, u64)> {
    if let Some(&reversed) = ranges.iter().find(|(start, end)| start > end) {
        return Err(reversed);
    }
    let cut = |block: u64| u32::try_from(block).unwrap_or(u32::MAX).min(blocks);
    let mut sorted: Vec<Range<u32>> = ranges
        .iter()
        .map(|&(start, end)| cut(start)..cut(end))
        .collect();
    sorted.retain(|range| !range.is_empty());
    sorted.sort_unstable_by_key(|range| range.start);
    sorted.dedup_by(|next, last| {
        let joins = next.start <= last.end;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    Ok(sorted)
}
