//! Comparison of dumps without the order of their blocks.

use super::rank_dump::{HashRow, RankDump};
use crate::block::LocalHash;
use crate::index::salts::{SaltRef, SaltRow};

/// Returns the content of a dump without the order of its blocks, which depends on the order of
/// insertion into the tries. For tests of this crate and of the server.
pub fn order_free_content(dump: &RankDump) -> impl PartialEq + std::fmt::Debug + use<> {
    let mut paths: Vec<Vec<LocalHash>> = Vec::new();
    for block in &dump.blocks {
        let mut path = block
            .parent
            .map(|parent| paths[parent as usize].clone())
            .unwrap_or_default();
        path.push(block.local);
        paths.push(path);
    }
    let row = |row: &HashRow| (row.engine, paths[row.block as usize].clone(), row.copies);
    let mut hashes: Vec<_> = dump.hashes.iter().map(row).collect();
    hashes.sort_by_key(|(engine, ..)| *engine);
    paths.sort();
    let salt = |row: &SaltRow| match row.salt {
        SaltRef::Named(number) => (*row, Some(dump.salts.names[number as usize].clone())),
        _ => (*row, None),
    };
    // Salts are numbered in the order of insertion.
    let salts = dump.salts.rows.iter().map(salt).map(|(row, name)| {
        (
            row.engine,
            row.salt == SaltRef::Ambiguous,
            name,
            row.copies,
            row.stale,
        )
    });
    let salts = (
        dump.salts.has_salts,
        dump.salts.is_full,
        salts.collect::<Vec<_>>(),
    );
    (
        hashes,
        paths,
        dump.orphans.clone(),
        dump.groups.clone(),
        dump.shares.clone(),
        salts,
    )
}
