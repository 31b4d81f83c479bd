//! The unix socket, and its takeover by another process without a gap.
//!
//! A new socket is bound under a temporary name and then renamed, so that a process listens at the
//! path at every instant. It replaces an existing socket only if the current owner is dead or
//! reports `draining` over gRPC health. The directory is locked during the check, so two processes
//! cannot race. While it loads, the new process holds a [`SuccessorLock`], and the draining owner
//! serves until the lock is released.

use std::fs::{self, File, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tracing::{info, warn};
use warmroute_runtime::lifecycle::{Readiness, directory};

use super::health::DRAINING;

/// Timeout of the health check of the current owner. An owner that does not answer in time is busy
/// and is not replaced.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time that this process delays the replacement of a draining process while it still
/// loads. Must be less than the grace period.
const MAX_TURN_WAIT: Duration = Duration::from_secs(2);

/// Interval of warnings about an address in use.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Poll interval for the owner of a socket or an address.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Identity of a socket file: path, device and inode. The inode does not change while a process
/// listens.
#[derive(Clone)]
pub(super) struct SocketIdentity {
    path: PathBuf,
    file: (u64, u64),
}

impl SocketIdentity {
    fn of(path: &Path, socket: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: file_id(&fs::symlink_metadata(socket)?),
        })
    }

    /// Returns the path of the socket.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until the file is replaced or removed.
    pub(super) async fn wait_replaced(&self) {
        while fs::symlink_metadata(&self.path).is_ok_and(|found| file_id(&found) == self.file) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

fn file_id(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Lock of a file beside the socket, which a process holds while it loads and will replace the
/// socket of a draining process. The kernel releases the lock if the process dies.
pub(super) struct SuccessorLock {
    path: PathBuf,
    _file: File,
}

impl SuccessorLock {
    /// Locks the file for the socket at `socket`. Several successors may hold it.
    pub(super) async fn acquire(socket: &Path) -> anyhow::Result<Self> {
        let path = successor_file(socket);
        let file = File::create(&path)?;
        // A draining process holds the exclusive lock only for the instant of its check.
        let file = tokio::task::spawn_blocking(move || file.lock_shared().map(|()| file)).await??;
        Ok(Self { path, _file: file })
    }
}

impl Drop for SuccessorLock {
    fn drop(&mut self) {
        // Another successor may have removed it.
        let _removed = fs::remove_file(&self.path);
    }
}

/// Waits while a successor of the socket at `socket` loads.
pub(super) async fn wait_successor_loaded(socket: &Path) {
    let path = successor_file(socket);
    let is_locked = || {
        let file = File::open(&path);
        file.is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    };
    while is_locked() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn successor_file(socket: &Path) -> PathBuf {
    let mut path = socket.to_owned().into_os_string();
    path.push(".successor");
    path.into()
}

/// The file of a unix socket, removed on drop unless a successor has replaced it.
///
/// It is dropped after the listener, so if a connection succeeds, another process owns the socket.
/// Comparing inodes would not be sufficient, because their numbers are reused.
pub(super) struct SocketFile(SocketIdentity);

/// Owner of a socket.
#[derive(Debug, PartialEq, Eq)]
enum SocketOwner {
    /// No process listens.
    Vacant,
    /// A process that drains and can be replaced.
    Draining,
    /// A process that serves or is starting.
    Active,
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.0.path
    }

    pub(super) fn identity(&self) -> SocketIdentity {
        self.0.clone()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let path = self.path();
        let Ok(directory) = File::open(directory::of(path)) else {
            return;
        };
        // If the directory is locked, a successor is replacing the socket.
        let ours = directory.try_lock().is_ok() && is_socket(path);
        if ours && std::os::unix::net::UnixStream::connect(path).is_err() {
            // The file may already be removed.
            let _removed = fs::remove_file(path);
        }
    }
}

/// Binds the socket at `path`.
pub(super) async fn bind(path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
    directory::prepare(path)?;
    let directory = directory::of(path).to_owned();
    let _lock = tokio::task::spawn_blocking(move || lock_directory(&directory)).await??;
    if inactive_owner(path).await? == SocketOwner::Draining {
        info!(path = %path.display(), "owner of the unix socket is draining; replacing its socket");
    }
    let mut temporary = path.to_owned().into_os_string();
    temporary.push(".new");
    if is_socket(Path::new(&temporary)) {
        // A crashed process left it behind; the lock excludes any other process.
        fs::remove_file(&temporary)?;
    }
    let listener = UnixListener::bind(&temporary)?;
    let identity = SocketIdentity::of(path, Path::new(&temporary))?;
    fs::rename(&temporary, path)?;
    Ok((listener, SocketFile(identity)))
}

/// Returns whether the owner of the socket at `path` is draining or dead, so that its other
/// addresses will become free. A regular shutdown removes the file, so a file without an owner
/// means a crash. Fails if the socket cannot be replaced.
pub(super) async fn is_replaceable(path: &Path) -> anyhow::Result<bool> {
    let owner = inactive_owner(path).await?;
    Ok(owner == SocketOwner::Draining || is_socket(path))
}

/// Describes that the socket cannot be bound.
pub(super) fn describe_bind_failure(path: &Path) -> String {
    format!("the ext_proc socket {} cannot be bound", path.display())
}

/// Returns the owner of the socket, or an error if it may not be replaced.
async fn inactive_owner(path: &Path) -> anyhow::Result<SocketOwner> {
    let owner = socket_owner(path).await;
    if owner == SocketOwner::Active {
        bail!(
            "another process listens on it; stop that process, or change \
            `listeners.ext_proc.unix_socket`"
        );
    }
    if fs::symlink_metadata(path).is_ok() && !is_socket(path) {
        bail!("the path exists and is not a socket");
    }
    Ok(owner)
}

/// Binds an address as soon as it is free. Logs a warning periodically, because it may belong to
/// another program.
pub(super) async fn bind_when_free(name: &str, address: SocketAddr) -> TcpListener {
    let mut last_warning = tokio::time::Instant::now();
    loop {
        if let Ok(listener) = TcpListener::bind(address).await {
            return listener;
        }
        if last_warning.elapsed() > WARN_INTERVAL {
            last_warning = tokio::time::Instant::now();
            warn!(listener = name, %address, "address still in use, possibly by another program; waiting");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// If a draining process owns the socket, waits until this process can replace it: until all
/// startup steps except `own_step` have ended, the owner has stopped, or a timeout has passed.
pub(super) async fn wait_turn(path: &Path, readiness: &Readiness, own_step: &str) {
    let is_loaded = async {
        let mut changes = readiness.subscribe();
        // The channel closes with the process.
        let _changed = changes
            .wait_for(|pending| pending.iter().all(|step| step == own_step))
            .await;
    };
    let owner_gone = async {
        while socket_owner(path).await == SocketOwner::Draining {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        () = is_loaded => {}
        () = owner_gone => {}
        () = tokio::time::sleep(MAX_TURN_WAIT) => {}
    }
}

async fn socket_owner(path: &Path) -> SocketOwner {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    if let Err(error) = UnixStream::connect(path).await {
        // Any other error means that a process, possibly a busy one, owns the socket.
        let is_unused = matches!(error.kind(), ConnectionRefused | NotFound);
        return if is_unused {
            SocketOwner::Vacant
        } else {
            SocketOwner::Active
        };
    }
    match tokio::time::timeout(HEALTH_TIMEOUT, is_draining(path)).await {
        Ok(Ok(true)) => SocketOwner::Draining,
        _ => SocketOwner::Active,
    }
}

async fn is_draining(path: &Path) -> anyhow::Result<bool> {
    let path = path.to_str().context("the path is not valid UTF-8")?;
    let channel = Endpoint::from_shared(format!("unix:{path}"))?
        .connect()
        .await?;
    let request = HealthCheckRequest {
        service: DRAINING.to_owned(),
    };
    let answer = HealthClient::new(channel).check(request).await?;
    Ok(answer.into_inner().status() == ServingStatus::Serving)
}

fn lock_directory(directory: &Path) -> io::Result<File> {
    let directory = File::open(directory)?;
    directory.lock()?;
    Ok(directory)
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;

    use super::*;
    use crate::app::health::GrpcHealth;

    fn socket_path() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ext_proc.sock");
        (dir, path)
    }

    #[tokio::test]
    async fn dead_socket_is_replaced_and_removed_at_end() {
        let (_dir, path) = socket_path();
        let (listener, old_file) = bind(&path).await.unwrap();
        // At the end of draining the file exists but no process listens.
        drop(listener);
        let (listener, file) = bind(&path).await.unwrap();
        drop(old_file);
        assert!(
            UnixStream::connect(&path).await.is_ok(),
            "the successor's socket was removed"
        );
        drop(listener);
        drop(file);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn live_owner_is_replaced_only_while_draining() {
        let (_dir, path) = socket_path();
        let (listener, old_file) = bind(&path).await.unwrap();
        let health = GrpcHealth::default();
        let readiness = Readiness::default();
        health.publish(&readiness).await;
        let serving = Server::builder().add_service(health.service());
        let server = tokio::spawn(serving.serve_with_incoming(UnixListenerStream::new(listener)));
        assert!(bind(&path).await.is_err(), "an active process was replaced");
        let starting = readiness.begin_step("a step");
        health.publish(&readiness).await;
        assert!(
            bind(&path).await.is_err(),
            "a starting process was replaced"
        );
        drop(starting);
        readiness.drain();
        health.publish(&readiness).await;
        let (successor, _file) = bind(&path).await.unwrap();
        tokio::time::timeout(Duration::from_secs(20), old_file.identity().wait_replaced())
            .await
            .expect("the old process does not detect the replacement");
        drop(old_file);
        UnixStream::connect(&path).await.unwrap();
        assert!(
            successor.accept().await.is_ok(),
            "a new connection does not reach the successor"
        );
        server.abort();
    }

    #[tokio::test]
    async fn successor_lock_ends_with_its_holders() {
        let (_dir, path) = socket_path();
        wait_successor_loaded(&path).await;
        let first = SuccessorLock::acquire(&path).await.unwrap();
        let second = SuccessorLock::acquire(&path).await.unwrap();
        let waiting = wait_successor_loaded(&path);
        tokio::pin!(waiting);
        let soon = Duration::from_millis(20);
        assert!(tokio::time::timeout(soon, &mut waiting).await.is_err());
        drop(second);
        drop(first);
        tokio::time::timeout(Duration::from_secs(20), waiting)
            .await
            .expect("the lock was not released");
        assert!(!successor_file(&path).exists());
    }

    #[tokio::test(start_paused = true)]
    async fn silent_owner_is_not_replaced() {
        let (_dir, path) = socket_path();
        let (_listener, _file) = bind(&path).await.unwrap();
        assert!(bind(&path).await.is_err());
    }

    #[tokio::test]
    async fn non_socket_file_is_not_replaced() {
        let (_dir, path) = socket_path();
        fs::write(&path, "text").unwrap();
        let error = bind(&path).await.err().unwrap();
        assert!(error.to_string().contains("not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    }
}
