//! The file that is left at the end for the next start.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use tracing::{info, warn};

use crate::index::dump::{self, RankDump, Reader};
use crate::worker::WorkerRank;

/// Bytes read or written at a time.
const BUFFER: usize = 1 << 20;

/// Writes what is held, rank by rank. The file is either whole or as it was before, as it also stays where there is nothing.
pub fn write(path: &Path, ranks: impl Iterator<Item = RankDump>) -> anyhow::Result<u32> {
    let beside = path.with_added_extension(format!("{}.part", std::process::id()));
    let written = write_beside(&beside, ranks).and_then(|ranks| {
        match ranks {
            0 => std::fs::remove_file(&beside)?,
            _ => std::fs::rename(&beside, path)?,
        }
        Ok(ranks)
    });
    if written.is_err() {
        // What is not whole is of no use to anybody; if it cannot be removed, it stays.
        let _ = std::fs::remove_file(&beside);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn write_beside(path: &Path, ranks: impl Iterator<Item = RankDump>) -> std::io::Result<u32> {
    // A file that a process with the same id left. If it is not a file, creating the file fails.
    let _removed = std::fs::remove_file(path);
    // The salts of tenants are in it, so neither a link nor a file with another mode is used.
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let mut out = BufWriter::with_capacity(BUFFER, file);
    let mut count = 0;
    dump::begin(&mut out)?;
    for held in ranks {
        held.write(&mut out)?;
        count += 1;
    }
    dump::end(&mut out, count)?;
    out.flush()?;
    out.get_ref().sync_all()?;
    Ok(count)
}

/// What the file says, if it is fresh enough. Without one, or with a damaged one, we start without.
pub(super) fn read(
    path: &Path,
    max_age: Duration,
    now: SystemTime,
) -> HashMap<WorkerRank, Arc<RankDump>> {
    if !path.exists() {
        return HashMap::new();
    }
    match try_read(path, max_age, now) {
        Ok(ranks) => {
            info!(path = %path.display(), ranks = ranks.len(), "what was known at the last end is read");
            ranks
        }
        Err(problem) => {
            let problem = format!("{problem:#}");
            warn!(path = %path.display(), problem, "what was known at the last end is of no use");
            HashMap::new()
        }
    }
}

fn try_read(
    path: &Path,
    max_age: Duration,
    now: SystemTime,
) -> anyhow::Result<HashMap<WorkerRank, Arc<RankDump>>> {
    let file = File::open(path)?;
    // A file from the future is one of a clock that was set back.
    let age = now
        .duration_since(file.metadata()?.modified()?)
        .unwrap_or_default();
    ensure!(
        age <= max_age,
        "it is {} s old, and may be {} s (`takeover.max_age`)",
        age.as_secs(),
        max_age.as_secs()
    );
    let ranks = Reader::new(BufReader::with_capacity(BUFFER, file))?;
    Ok(ranks
        .map(|held| held.map(|held| (held.rank(), Arc::new(held.of_the_past()))))
        .collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::block::{EngineHash, LocalHash};
    use crate::index::{KvEvent, PrefixIndex, StoredBlock};
    use crate::tier::Tier;
    use crate::worker::{DpRank, Slot, WorkerId};

    fn held(worker: u64) -> RankDump {
        let mut writer = PrefixIndex::new().join(Slot(0));
        let block = StoredBlock {
            engine: EngineHash(worker),
            local: LocalHash(worker),
        };
        writer.apply(&KvEvent::Stored {
            parent: None,
            blocks: vec![block],
            tier: Tier::Device,
        });
        writer.portrait(WorkerRank {
            worker: WorkerId(worker),
            rank: DpRank(0),
        })
    }

    #[test]
    fn what_is_old_damaged_or_missing_is_as_good_as_nothing_and_a_failed_writing_leaves_the_last_one()
     {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("index.warmroute");
        let (minute, now) = (Duration::from_secs(60), SystemTime::now());
        assert_eq!(read(&path, minute, now), HashMap::new(), "there is none");
        assert_eq!(write(&path, [held(1), held(2)].into_iter()).unwrap(), 2);
        let both: HashMap<_, _> = [held(1), held(2)]
            .map(|held| (held.rank(), Arc::new(held)))
            .into();
        assert_eq!(read(&path, minute, now), both);
        assert_eq!(
            read(&path, minute, now - minute),
            both,
            "the clock was set back"
        );
        assert_eq!(
            read(&path, minute, now + 2 * minute),
            HashMap::new(),
            "too old"
        );

        // Somebody else's folder is in the place of the file to be written.
        let part = folder
            .path()
            .join(format!("index.warmroute.{}.part", std::process::id()));
        std::fs::create_dir(&part).unwrap();
        let problem = format!("{:#}", write(&path, [held(3)].into_iter()).unwrap_err());
        assert!(problem.contains("index.warmroute"), "{problem}");
        assert_eq!(read(&path, minute, now), both);
        std::fs::remove_dir(&part).unwrap();
        // A link in its place is not followed, and the mode of the file in its place is not kept.
        let target = folder.path().join("target");
        std::fs::write(&target, "text").unwrap();
        std::os::unix::fs::symlink(&target, &part).unwrap();
        assert_eq!(write(&path, [held(1), held(2)].into_iter()).unwrap(), 2);
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "text");
        std::fs::remove_file(target).unwrap();
        std::fs::write(&part, "text").unwrap();
        std::fs::set_permissions(&part, PermissionsExt::from_mode(0o644)).unwrap();
        assert_eq!(write(&path, [held(1), held(2)].into_iter()).unwrap(), 2);
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(write(&path, std::iter::empty()).unwrap(), 0);
        assert_eq!(
            read(&path, minute, now),
            both,
            "nothing is no reason to forget"
        );
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "and nothing else is left"
        );

        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(bytes.len() - 1);
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(
            read(&path, minute, now),
            HashMap::new(),
            "half of it is nothing"
        );
    }
}
