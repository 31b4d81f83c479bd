//! Snapshot files of the index and of the learned latency, which are written at shutdown and read at
//! the next start.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use tracing::{info, warn};

use warmroute_core::index::dump::{self, DumpReader, RankDump};
use warmroute_core::load::LatencySnapshot;
use warmroute_core::worker::WorkerRank;
use warmroute_settings::{ByteSize, open_regular_file, read_limited};

/// Extension that is added to the path of the index, for the file of the learned latency.
const LATENCY_EXTENSION: &str = "latency.json";

/// Size of the read and write buffers.
const BUFFER_BYTES: usize = 1 << 20;

/// Maximum size of the snapshot file, which is read as a stream.
const MAX_SNAPSHOT_FILE: ByteSize = ByteSize::mib(64 << 10);

/// Maximum age of a file that is read.
const MAX_SNAPSHOT_AGE: Duration = Duration::from_secs(300);

/// Maximum size of the file with the learned latency.
const MAX_LATENCY_FILE: ByteSize = ByteSize::mib(64);

/// Writes the ranks and returns their number. The file is replaced atomically. If there are no
/// ranks, it is not replaced.
pub fn write_snapshot(path: &Path, ranks: impl Iterator<Item = RankDump>) -> anyhow::Result<u32> {
    replace_file(path, |out| {
        let mut count = 0;
        dump::write_header(out)?;
        for dump in ranks {
            dump.write(out)?;
            count += 1;
        }
        dump::write_end(out, count)?;
        Ok(count)
    })
}

/// Writes the learned latency beside the index snapshot at `path`. The file is replaced atomically.
/// If nothing was learned, it is not replaced.
pub fn write_latency(path: &Path, latency: &LatencySnapshot) -> anyhow::Result<()> {
    replace_file(&latency_path(path), |out| {
        serde_json::to_writer(out, latency)?;
        Ok(u32::from(!latency.is_empty()))
    })?;
    Ok(())
}

fn latency_path(path: &Path) -> PathBuf {
    path.with_added_extension(LATENCY_EXTENSION)
}

/// Replaces a file atomically by the output of `write`, unless that returns 0.
fn replace_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<u32>,
) -> anyhow::Result<u32> {
    let temporary = path.with_added_extension(format!("{}.part", std::process::id()));
    let written = write_temporary(&temporary, write).and_then(|count| {
        match count {
            0 => std::fs::remove_file(&temporary)?,
            _ => std::fs::rename(&temporary, path)?,
        }
        Ok(count)
    });
    if written.is_err() {
        // Removes the incomplete file if possible.
        let _ = std::fs::remove_file(&temporary);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn write_temporary(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<u32>,
) -> std::io::Result<u32> {
    // A previous process with the same id may have left the file. If the path is not a file, the
    // removal and the creation below fail.
    let _removed = std::fs::remove_file(path);
    // The file contains tenant salts, so an existing link or a file with other permissions must not
    // be used.
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
    let count = write(&mut out)?;
    out.flush()?;
    out.get_ref().sync_all()?;
    Ok(count)
}

/// Returns the learned latency. Returns `None` if the file does not exist, is too old or is damaged.
pub(super) fn read_latency(path: &Path, now: SystemTime) -> Option<LatencySnapshot> {
    read_recent(&latency_path(path), now, |file| {
        Ok(serde_json::from_slice(&read_limited(
            file,
            MAX_LATENCY_FILE,
        )?)?)
    })
}

/// Returns the contents of the file. Returns an empty map if the file does not exist, is too old or
/// is damaged.
pub(super) fn read_snapshot(path: &Path, now: SystemTime) -> HashMap<WorkerRank, Arc<RankDump>> {
    let ranks = read_recent(path, now, read_ranks);
    if let Some(ranks) = &ranks {
        info!(path = %path.display(), ranks = ranks.len(), "warm start: snapshot file read");
    }
    ranks.unwrap_or_default()
}

fn read_ranks(file: File) -> anyhow::Result<HashMap<WorkerRank, Arc<RankDump>>> {
    let ranks = DumpReader::new(BufReader::with_capacity(BUFFER_BYTES, file))?;
    Ok(ranks
        .map(|dump| dump.map(|dump| (dump.rank(), Arc::new(dump.into_detached()))))
        .collect::<Result<_, _>>()?)
}

/// Reads a file unless it is too old. Returns `None` if it does not exist or is not usable.
fn read_recent<T>(
    path: &Path,
    now: SystemTime,
    read: impl FnOnce(File) -> anyhow::Result<T>,
) -> Option<T> {
    if !path.exists() {
        return None;
    }
    let read = open_recent(path, now).and_then(read);
    read.inspect_err(|problem| {
        let problem = format!("{problem:#}");
        warn!(path = %path.display(), problem, "warm start: snapshot file not usable");
    })
    .ok()
}

/// Opens a file unless it is too old.
fn open_recent(path: &Path, now: SystemTime) -> anyhow::Result<File> {
    let file = open_regular_file(path, MAX_SNAPSHOT_FILE)?;
    // If the modification time is in the future, the clock was set back, and the age counts as 0.
    let age = now
        .duration_since(file.metadata()?.modified()?)
        .unwrap_or_default();
    ensure!(
        age <= MAX_SNAPSHOT_AGE,
        "it is {} s old, the maximum is {} s",
        age.as_secs(),
        MAX_SNAPSHOT_AGE.as_secs()
    );
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use warmroute_core::block::{EngineHash, LocalHash, StorageTier};
    use warmroute_core::index::{KvEvent, PrefixIndex, StoredBlock};
    use warmroute_core::worker::RankSlot;

    /// Returns a dump of a rank with one block.
    fn rank_dump(worker: u64) -> RankDump {
        let mut writer = PrefixIndex::new().create_writer(RankSlot(0));
        let block = StoredBlock {
            engine: EngineHash(worker),
            local: LocalHash(worker),
        };
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: vec![block],
            tier: StorageTier::Device,
        });
        writer.snapshot(WorkerRank::new(worker, 0))
    }

    /// Returns ranks 1 and 2 in the form that `read_snapshot` returns.
    fn two_ranks() -> HashMap<WorkerRank, Arc<RankDump>> {
        [rank_dump(1), rank_dump(2)]
            .map(|dump| (dump.rank(), Arc::new(dump)))
            .into()
    }

    fn write_two_ranks(path: &Path) {
        let written = write_snapshot(path, [rank_dump(1), rank_dump(2)].into_iter());
        assert_eq!(written.unwrap(), 2);
    }

    #[test]
    fn missing_old_or_damaged_snapshot_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index.warmroute");
        let now = SystemTime::now();
        assert_eq!(
            read_snapshot(&path, now),
            HashMap::new(),
            "a missing file returned ranks"
        );
        write_two_ranks(&path);
        let both = two_ranks();
        assert_eq!(read_snapshot(&path, now), both);
        assert_eq!(
            read_snapshot(&path, now - MAX_SNAPSHOT_AGE),
            both,
            "a file from the future was rejected"
        );
        assert_eq!(
            read_snapshot(&path, now + 2 * MAX_SNAPSHOT_AGE),
            HashMap::new(),
            "an old file was read"
        );
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(bytes.len() - 1);
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(
            read_snapshot(&path, now),
            HashMap::new(),
            "a truncated file was read"
        );
    }

    #[test]
    fn failed_write_keeps_old_snapshot() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index.warmroute");
        write_two_ranks(&path);
        // A directory with the name of the temporary file makes the write fail.
        let part = directory
            .path()
            .join(format!("index.warmroute.{}.part", std::process::id()));
        std::fs::create_dir(&part).unwrap();
        let problem = format!(
            "{:#}",
            write_snapshot(&path, [rank_dump(3)].into_iter()).unwrap_err()
        );
        assert!(problem.contains("index.warmroute"), "{problem}");
        assert_eq!(read_snapshot(&path, SystemTime::now()), two_ranks());
    }

    #[test]
    fn foreign_temporary_file_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index.warmroute");
        let part = directory
            .path()
            .join(format!("index.warmroute.{}.part", std::process::id()));
        // A link with the name of the temporary file is not followed, and the permissions of an
        // existing file with that name are not used.
        let target = directory.path().join("target");
        std::fs::write(&target, "text").unwrap();
        std::os::unix::fs::symlink(&target, &part).unwrap();
        write_two_ranks(&path);
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "text");
        std::fs::remove_file(target).unwrap();
        std::fs::write(&part, "text").unwrap();
        std::fs::set_permissions(&part, PermissionsExt::from_mode(0o644)).unwrap();
        write_two_ranks(&path);
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(write_snapshot(&path, std::iter::empty()).unwrap(), 0);
        assert_eq!(
            read_snapshot(&path, SystemTime::now()),
            two_ranks(),
            "an empty snapshot replaced the file"
        );
        assert_eq!(
            std::fs::read_dir(directory.path()).unwrap().count(),
            1,
            "temporary files were left behind"
        );
    }
}
