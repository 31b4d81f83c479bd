//! Reader of files for asynchronous tasks.

use std::io;
use std::path::Path;

use tokio::task::spawn_blocking;
use warmroute_settings::{ByteSize, read_regular_file};

/// Reads a regular file of at most `limit` bytes on a thread for blocking calls, see
/// [`read_regular_file`].
pub async fn read(path: &Path, limit: ByteSize) -> io::Result<Vec<u8>> {
    let path = path.to_owned();
    spawn_blocking(move || read_regular_file(&path, limit))
        .await
        .map_err(io::Error::other)?
}
