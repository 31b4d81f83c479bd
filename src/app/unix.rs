//! The unix socket, and how one process takes it over from another without a gap. A new socket is bound beside its place
//! and then renamed into it, so that at every instant somebody is listening there. Who is alive and stays is never
//! replaced; who is dead is, and so is who says by gRPC health that it is draining. The folder is locked meanwhile, so
//! that of two who come or go at once one is first.

use std::fs::{self, File};
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

use super::health::DRAINING;
use crate::lifecycle::{Readiness, folder};

/// How long the one at the socket may take to say that it is leaving. Who takes longer is busy, and stays.
const ANSWER: Duration = Duration::from_secs(2);

/// How long the place of one who is leaving is not taken while our own caches are still being read: less than its grace.
const FLEET: Duration = Duration::from_secs(2);

/// How often it is said that an address is still taken.
const IMPATIENCE: Duration = Duration::from_secs(10);

/// How often we look meanwhile whether it is still there.
const LOOK: Duration = Duration::from_millis(50);

/// How a place in the file system is known again: its file stays the same one for as long as somebody listens by it.
#[derive(Clone)]
pub(super) struct Place {
    path: PathBuf,
    file: (u64, u64),
}

impl Place {
    fn of(path: &Path, socket: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: file(&fs::symlink_metadata(socket)?),
        })
    }

    /// Waits until a successor is there instead.
    pub(super) async fn lost(&self) {
        while fs::symlink_metadata(&self.path).is_ok_and(|found| file(&found) == self.file) {
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn file(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// The file of a unix socket; removed by drop, unless a successor has put its own in its place while we drained. Dropped
/// after the listener, so that whoever answers is somebody else. Inodes would not tell: their numbers are used again.
pub(super) struct SocketFile(Place);

/// Who is at a socket.
#[derive(Debug, PartialEq, Eq)]
enum Holder {
    Nobody,
    /// It serves, and asks for a successor.
    Leaving,
    Staying,
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.0.path
    }

    pub(super) fn place(&self) -> Place {
        self.0.clone()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let path = self.path();
        let Ok(folder) = File::open(folder::of(path)) else {
            return;
        };
        // Where it cannot be locked, a successor is making the place its own.
        let ours = folder.try_lock().is_ok() && is_socket(path);
        if ours && std::os::unix::net::UnixStream::connect(path).is_err() {
            // Gone already is as good as removed.
            let _removed = fs::remove_file(path);
        }
    }
}

/// Takes the place at `path`.
pub(super) async fn bind(path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
    folder::prepare(path)?;
    let folder = folder::of(path).to_owned();
    let _lock = tokio::task::spawn_blocking(move || lock(&folder)).await??;
    match holder(path).await {
        Holder::Nobody => {}
        Holder::Leaving => {
            info!(path = %path.display(), "taking over from a process that is draining")
        }
        Holder::Staying => bail!("another process answers on it"),
    }
    if fs::symlink_metadata(path).is_ok() && !is_socket(path) {
        bail!("there is a file that is not a socket");
    }
    let mut beside = path.to_owned().into_os_string();
    beside.push(".new");
    if is_socket(Path::new(&beside)) {
        // Left behind by one who died here; nobody else is here at a time.
        fs::remove_file(&beside)?;
    }
    let listener = UnixListener::bind(&beside)?;
    let place = Place::of(path, Path::new(&beside))?;
    fs::rename(&beside, path)?;
    Ok((listener, SocketFile(place)))
}

/// Whether the one at `path` is leaving, so that whatever else it has will be ours, too. One that ended well leaves no file
/// behind, so where nobody answers by a file its owner is at its end or dead.
pub(super) async fn is_left(path: &Path) -> bool {
    match holder(path).await {
        Holder::Leaving => true,
        Holder::Nobody => is_socket(path),
        Holder::Staying => false,
    }
}

/// Binds an address as soon as whoever has it is gone. Says so again and again while it is not: it may be somebody else's.
pub(super) async fn bind_when_free(name: &str, address: SocketAddr) -> TcpListener {
    let mut said = tokio::time::Instant::now();
    loop {
        if let Ok(listener) = TcpListener::bind(address).await {
            return listener;
        }
        if said.elapsed() > IMPATIENCE {
            said = tokio::time::Instant::now();
            warn!(listener = name, %address, "this address is still taken, perhaps by another program; waiting for it");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Waits until this process can do at least as well as one that serves at `path` and is leaving, where there is one: it
/// knows its fleet and what is cached there, or waiting for that has no use. `besides` is what we hold up ourselves.
pub(super) async fn wait_turn(path: &Path, readiness: &Readiness, besides: &str) {
    let able = async {
        let mut changes = readiness.changes();
        // Ends with the process.
        let _changed = changes
            .wait_for(|pending| pending.iter().all(|step| step == besides))
            .await;
    };
    let gone = async {
        while holder(path).await == Holder::Leaving {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        () = able => {}
        () = gone => {}
        () = tokio::time::sleep(FLEET) => {}
    }
}

async fn holder(path: &Path) -> Holder {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    if let Err(error) = UnixStream::connect(path).await {
        // Whoever is only busy, or somebody else's, is somebody.
        let nobody = matches!(error.kind(), ConnectionRefused | NotFound);
        return if nobody {
            Holder::Nobody
        } else {
            Holder::Staying
        };
    }
    match tokio::time::timeout(ANSWER, is_draining(path)).await {
        Ok(Ok(true)) => Holder::Leaving,
        _ => Holder::Staying,
    }
}

async fn is_draining(path: &Path) -> anyhow::Result<bool> {
    let path = path.to_str().context("the path is no text")?;
    let channel = Endpoint::from_shared(format!("unix:{path}"))?
        .connect()
        .await?;
    let asked = HealthCheckRequest {
        service: DRAINING.to_owned(),
    };
    let answer = HealthClient::new(channel).check(asked).await?;
    Ok(answer.into_inner().status() == ServingStatus::Serving)
}

fn lock(folder: &Path) -> io::Result<File> {
    let folder = File::open(folder)?;
    folder.lock()?;
    Ok(folder)
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::transport::Server;

    use super::*;
    use crate::app::health::Health;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ext_proc.sock");
        (dir, path)
    }

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_the_last_one_tidies_up() {
        let (_dir, path) = place();
        let (listener, old_file) = bind(&path).await.unwrap();
        // Draining to its end: nobody listens any more, but the file is still held.
        drop(listener);
        let (listener, file) = bind(&path).await.unwrap();
        drop(old_file);
        assert!(
            UnixStream::connect(&path).await.is_ok(),
            "the successor's socket is gone"
        );
        drop(listener);
        drop(file);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn one_who_answers_is_replaced_only_when_it_says_that_it_is_leaving() {
        let (_dir, path) = place();
        let (listener, old_file) = bind(&path).await.unwrap();
        let (health, readiness) = (Health::default(), Readiness::default());
        health.tell(&readiness).await;
        let serving = Server::builder().add_service(health.service());
        let server = tokio::spawn(serving.serve_with_incoming(UnixListenerStream::new(listener)));
        assert!(
            bind(&path).await.is_err(),
            "a process that stays was replaced"
        );
        let starting = readiness.wait_for("something");
        health.tell(&readiness).await;
        assert!(
            bind(&path).await.is_err(),
            "a process that starts was replaced"
        );
        drop(starting);
        readiness.drain();
        health.tell(&readiness).await;
        let (successor, _file) = bind(&path).await.unwrap();
        tokio::time::timeout(Duration::from_secs(20), old_file.place().lost())
            .await
            .expect("the old one does not see it");
        drop(old_file);
        UnixStream::connect(&path).await.unwrap();
        assert!(
            successor.accept().await.is_ok(),
            "whoever connects now meets the successor"
        );
        server.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_stays() {
        let (_dir, path) = place();
        let (_listener, _file) = bind(&path).await.unwrap();
        assert!(bind(&path).await.is_err());
    }

    #[tokio::test]
    async fn other_files_are_left_alone() {
        let (_dir, path) = place();
        fs::write(&path, "text").unwrap();
        let error = bind(&path).await.err().unwrap();
        assert!(error.to_string().contains("not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    }
}
