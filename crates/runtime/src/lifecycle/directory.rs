//! Directories of files that other processes trust: the unix socket and Envoy's endpoint file. A
//! local user with write access to these files could receive prompts and responses.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

const WRITABLE_BY_OTHERS: u32 = 0o002;
const WRITABLE_BY_GROUP_OR_OTHERS: u32 = 0o022;
/// The sticky bit of a directory that is writable by all users, such as `/tmp`. Any user may create
/// files, and delete only their own.
const SHARED: u32 = 0o1002;

/// Reason for rejecting a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// Another user can replace the files in it.
    #[error("the directory belongs to user {owner}, which can replace the files in it; {FIX}")]
    OtherOwner {
        /// Owner of the directory.
        owner: u32,
    },
    /// Any user can create files in it first.
    #[error("any user of this host can create files in the directory; {FIX}")]
    Shared,
}

const FIX: &str =
    "use one of its own that warmroute creates, or /run/warmroute made by the service manager";

/// Creates the directory of a file if it does not exist, readable by all and writable only by this
/// user. Rejects a directory in which another user could replace the file.
pub fn prepare(file: &Path) -> io::Result<()> {
    let directory = of(file);
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)?;
    let directory = directory.canonicalize()?;
    let parent = directory.parent().map(fs::metadata).transpose()?;
    let found = DirectoryAccess::new(&fs::metadata(&directory)?, parent.as_ref());
    found
        .check(rustix::process::geteuid().as_raw())
        .map_err(io::Error::other)
}

/// Returns the directory of a file.
pub fn of(file: &Path) -> &Path {
    file.parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Owner and permissions of a directory.
#[derive(Clone, Copy, Debug)]
struct DirectoryAccess {
    owner: u32,
    mode: u32,
    /// Mode of the parent directory.
    parent_mode: u32,
}

impl DirectoryAccess {
    fn new(directory: &Metadata, parent: Option<&Metadata>) -> Self {
        Self {
            owner: directory.uid(),
            mode: directory.mode(),
            parent_mode: parent.map_or(0, |parent| parent.mode()),
        }
    }

    /// Checks the directory for a user.
    ///
    /// A directory of root is accepted even if others can write to it, because containers of a pod
    /// share such volumes. A directory of another user is accepted only if no other user can write
    /// to it and its parent is not writable by all users.
    fn check(self, user: u32) -> Result<(), DirectoryError> {
        let Self {
            owner,
            mode,
            parent_mode,
        } = self;
        if mode & SHARED == SHARED {
            return Err(DirectoryError::Shared);
        }
        let is_trusted = owner == user || owner == 0;
        if !is_trusted
            && (mode & WRITABLE_BY_GROUP_OR_OTHERS != 0 || parent_mode & WRITABLE_BY_OTHERS != 0)
        {
            return Err(DirectoryError::OtherOwner { owner });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn directories_of_other_users_are_rejected() {
        let other = Err(DirectoryError::OtherOwner { owner: 7 });
        let cases = [
            // Case, owner, mode, mode of the parent, result for user 5.
            ("own directory in /tmp", 5, 0o700, 0o1777, Ok(())),
            ("own directory, group may write", 5, 0o2770, 0o755, Ok(())),
            ("directory of root", 0, 0o755, 0o755, Ok(())),
            ("volume of a pod", 0, 0o777, 0o755, Ok(())),
            ("/tmp itself", 0, 0o1777, 0o755, Err(DirectoryError::Shared)),
            ("directory of another user in /tmp", 7, 0o777, 0o1777, other),
            (
                "directory of another user in /tmp, not writable by others",
                7,
                0o755,
                0o1777,
                other,
            ),
            (
                "directory of another user, writable by a group",
                7,
                0o775,
                0o755,
                other,
            ),
            ("mounted directory of another user", 7, 0o755, 0o755, Ok(())),
        ];
        for (case, owner, mode, parent_mode, expected) in cases {
            assert_eq!(
                DirectoryAccess {
                    owner,
                    mode,
                    parent_mode
                }
                .check(5),
                expected,
                "{case}"
            );
        }
    }

    #[test]
    fn new_directory_is_writable_by_its_owner_only() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("a/b/ext_proc.sock");
        prepare(&file).unwrap();
        assert_eq!(
            fs::metadata(of(&file)).unwrap().permissions().mode() & 0o022,
            0
        );
        fs::set_permissions(of(&file), fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(
            prepare(&file)
                .unwrap_err()
                .to_string()
                .contains("any user of this host")
        );
    }
}
