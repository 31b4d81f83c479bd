//! Reader of the files that settings name, and errors for their paths.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use crate::units::ByteSize;

/// Maximum size of a file with a secret: a key, a certificate, a token or a password.
pub const MAX_SECRET_FILE: ByteSize = ByteSize::mib(1);

/// Maximum size of a file with settings: the configuration, or a list of workers.
pub const MAX_SETTINGS_FILE: ByteSize = ByteSize::mib(16);

/// Opens a regular file of at most `limit` bytes. The call does not wait for the writer of a named
/// pipe. Other kinds of files and larger files are errors, because they may block a read or fill
/// the memory.
pub fn open_regular_file(path: &Path, limit: ByteSize) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            // Sockets cannot be opened.
            Some(errno) if errno == rustix::io::Errno::NXIO.raw_os_error() => not_regular("socket"),
            _ => error,
        })?;
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(not_regular("directory"));
    }
    if kind.is_fifo() {
        return Err(not_regular("named pipe"));
    }
    if !kind.is_file() {
        return Err(not_regular("device"));
    }
    if metadata.len() > limit.0 {
        return Err(too_large(limit));
    }
    Ok(file)
}

/// Reads a regular file of at most `limit` bytes, see [`open_regular_file`].
pub fn read_regular_file(path: &Path, limit: ByteSize) -> io::Result<Vec<u8>> {
    // The file may grow while it is read.
    read_limited(open_regular_file(path, limit)?, limit)
}

/// Reads to the end. A content of more than `limit` bytes is an error.
pub fn read_limited(from: impl Read, limit: ByteSize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limit.0.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit.0 {
        return Err(too_large(limit));
    }
    Ok(bytes)
}

fn not_regular(kind: &str) -> io::Error {
    let text = format!("this is a {kind}, not a regular file");
    io::Error::new(ErrorKind::InvalidInput, text)
}

fn too_large(limit: ByteSize) -> io::Error {
    let text = format!("the file is larger than {limit}");
    io::Error::new(ErrorKind::FileTooLarge, text)
}

/// Returns the error text for a path that is not a file.
pub fn describe_missing_file(file: &Path) -> String {
    let kind = if file.exists() {
        "is not a file"
    } else {
        "does not exist"
    };
    format!(
        "`{}` {kind}; relative paths start at the directory of this settings file",
        file.display()
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[test]
    fn only_regular_files_below_the_limit_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("file"), "12345").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        assert!(
            Command::new("mkfifo")
                .arg(at("pipe"))
                .status()
                .unwrap()
                .success()
        );
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let read = |path: &Path, limit| {
            read_regular_file(path, ByteSize(limit)).map_err(|error| error.to_string())
        };
        assert_eq!(read(&at("file"), 5), Ok(b"12345".to_vec()));
        assert_eq!(read(&at("link"), 5), Ok(b"12345".to_vec()));
        // The kernel reports a size of 0 for these files.
        assert!(read(Path::new("/proc/self/status"), 1 << 20).is_ok());
        let cases = [
            (at("file"), "the file is larger than 4B"),
            ("/proc/self/status".into(), "the file is larger than 4B"),
            (at("pipe"), "this is a named pipe, not a regular file"),
            (at("socket"), "this is a socket, not a regular file"),
            (at(""), "this is a directory, not a regular file"),
            ("/dev/zero".into(), "this is a device, not a regular file"),
        ];
        for (path, expected) in cases {
            assert_eq!(
                read(&path, 4),
                Err(expected.to_owned()),
                "{}",
                path.display()
            );
        }
        assert!(read(&at("absent"), 4).unwrap_err().contains("No such file"));
    }
}
