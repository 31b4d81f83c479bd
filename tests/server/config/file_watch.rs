//! Changes of the workers file.

use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;
use warmroute_testbed::ports::PATIENCE;

use super::*;

/// Watched workers file in its own directory. Dropping it ends the watch.
struct WatchedFile {
    directory: tempfile::TempDir,
    fleet: watch::Receiver<Vec<u64>>,
    metrics: Arc<Metrics>,
    _task: AbortOnDropHandle<()>,
}

const NEVER: Duration = Duration::from_secs(3600);

impl WatchedFile {
    /// Watches `workers.yaml`, which `create_files` must create in the directory.
    fn start(poll: Duration, create_files: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        create_files(directory.path());
        let (report, fleet) = watch::channel(Vec::new());
        let metrics = Arc::new(Metrics::new());
        let model = WorkerModel {
            name: "m".into(),
            block_size: BlockSize::new(16).unwrap(),
            uses_bootstrap: false,
        };
        let watched = WorkersFile {
            path: directory.path().join("workers.yaml"),
            models: vec![model],
            timing: FileWatchTiming {
                poll,
                debounce: Duration::from_millis(10),
            },
        };
        let watch_future = file::watch(watched, Arc::clone(&metrics), move |workers| {
            report.send_replace(workers.iter().map(|worker| worker.id.0).collect());
        });
        let task = tokio::spawn(async move {
            watch_future.await;
        });
        Self {
            directory,
            fleet,
            metrics,
            _task: AbortOnDropHandle::new(task),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn rename_into_place(&self, text: &str) {
        fs::write(self.path("next"), text).unwrap();
        fs::rename(self.path("next"), self.path("workers.yaml")).unwrap();
    }

    async fn wait_fleet(&mut self, ids: &[u64]) {
        let waiting = tokio::time::timeout(PATIENCE, self.fleet.wait_for(|fleet| fleet == ids));
        let reached = matches!(waiting.await, Ok(Ok(_)));
        assert!(
            reached,
            "the fleet is {:?}, not {ids:?}",
            *self.fleet.borrow()
        );
    }

    fn reloads(&self, outcome: &'static str) -> u64 {
        self.metrics
            .workers
            .file_reloads
            .get_or_create(&OutcomeLabel { outcome })
            .get()
    }

    async fn wait_valid(&self, valid: i64) {
        let reached = async {
            while self.metrics.workers.file_last_reload_successful.get() != Some(valid) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, reached)
            .await
            .expect("the file's validity does not change");
    }
}

fn list(ids: &[u64]) -> String {
    ids.iter()
        .map(|id| format!("- {{id: {id}, endpoint: '10.0.0.{id}:8000'}}\n"))
        .collect()
}

#[tokio::test]
async fn rename_and_write_are_detected_without_polling() {
    let mut watched = WatchedFile::start(NEVER, |directory| {
        fs::write(directory.join("workers.yaml"), list(&[1])).unwrap()
    });
    watched.wait_fleet(&[1]).await;
    watched.rename_into_place(&list(&[1, 2]));
    watched.wait_fleet(&[1, 2]).await;
    fs::write(watched.path("workers.yaml"), list(&[3])).unwrap();
    watched.wait_fleet(&[3]).await;
    assert_eq!(watched.reloads("invalid"), 0);
}

#[tokio::test]
async fn file_created_later_is_detected() {
    let mut watched = WatchedFile::start(NEVER, |_| ());
    watched.wait_valid(0).await;
    watched.rename_into_place(&list(&[1]));
    watched.wait_fleet(&[1]).await;
}

#[tokio::test]
async fn config_map_symlink_swap_is_detected() {
    let version = |directory: &Path, name: &str, ids: &[u64]| {
        fs::create_dir(directory.join(name)).unwrap();
        fs::write(directory.join(name).join("workers.yaml"), list(ids)).unwrap();
    };
    let mut watched = WatchedFile::start(NEVER, |directory| {
        version(directory, "..v1", &[1]);
        symlink("..v1", directory.join("..data")).unwrap();
        symlink("..data/workers.yaml", directory.join("workers.yaml")).unwrap();
    });
    watched.wait_fleet(&[1]).await;
    version(watched.directory.path(), "..v2", &[2, 3]);
    symlink("..v2", watched.path("..data_tmp")).unwrap();
    fs::rename(watched.path("..data_tmp"), watched.path("..data")).unwrap();
    fs::remove_dir_all(watched.path("..v1")).unwrap();
    watched.wait_fleet(&[2, 3]).await;
}

#[tokio::test]
async fn change_without_notification_is_found_by_polling() {
    let other_directory = tempfile::tempdir().unwrap();
    let target = other_directory.path().join("list.yaml");
    fs::write(&target, list(&[1])).unwrap();
    let mut watched = WatchedFile::start(Duration::from_millis(20), |directory| {
        symlink(&target, directory.join("workers.yaml")).unwrap()
    });
    watched.wait_fleet(&[1]).await;
    fs::write(other_directory.path().join("next"), list(&[2])).unwrap();
    fs::rename(other_directory.path().join("next"), &target).unwrap();
    watched.wait_fleet(&[2]).await;
}
