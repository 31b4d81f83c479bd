//! Folders of files that other processes trust: the unix socket and Envoy's endpoint file. A local
//! user with write access to these files could receive prompts and responses.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

const WRITABLE_BY_OTHERS: u32 = 0o002;
const WRITABLE_BY_GROUP_OR_OTHERS: u32 = 0o022;
/// The sticky bit of a folder that is writable by all users, such as `/tmp`. Any user may create
/// files, and delete only their own.
const SHARED: u32 = 0o1002;

/// Reason for rejecting a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FolderError {
    /// Another user can replace the files in it.
    #[error("the folder belongs to user {owner}, which can replace the files in it; {FIX}")]
    OtherOwner {
        /// Owner of the folder.
        owner: u32,
    },
    /// Any user can create files in it first.
    #[error("any user of this host can create files in the folder; {FIX}")]
    Shared,
}

const FIX: &str =
    "use one of its own that warmroute creates, or /run/warmroute made by the service manager";

/// Creates the folder of a file if it does not exist, readable by all and writable only by this
/// user. Rejects a folder in which another user could replace the file.
pub fn prepare(file: &Path) -> io::Result<()> {
    let folder = of(file);
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(folder)?;
    let folder = folder.canonicalize()?;
    let parent = folder.parent().map(fs::metadata).transpose()?;
    let found = FolderAccess::new(&fs::metadata(&folder)?, parent.as_ref());
    found
        .check(rustix::process::geteuid().as_raw())
        .map_err(io::Error::other)
}

/// Returns the folder of a file.
pub fn of(file: &Path) -> &Path {
    file.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Owner and permissions of a folder.
#[derive(Clone, Copy, Debug)]
struct FolderAccess {
    owner: u32,
    mode: u32,
    /// Mode of the parent folder.
    parent_mode: u32,
}

impl FolderAccess {
    fn new(folder: &Metadata, parent: Option<&Metadata>) -> Self {
        Self {
            owner: folder.uid(),
            mode: folder.mode(),
            parent_mode: parent.map_or(0, |parent| parent.mode()),
        }
    }

    /// Checks the folder for a user.
    ///
    /// A folder of root is accepted even if others can write to it, because containers of a pod
    /// share such volumes. A folder of another user is accepted only if no other user can write to
    /// it and its parent is not writable by all users.
    fn check(self, user: u32) -> Result<(), FolderError> {
        let Self {
            owner,
            mode,
            parent_mode,
        } = self;
        if mode & SHARED == SHARED {
            return Err(FolderError::Shared);
        }
        let is_trusted = owner == user || owner == 0;
        if !is_trusted
            && (mode & WRITABLE_BY_GROUP_OR_OTHERS != 0 || parent_mode & WRITABLE_BY_OTHERS != 0)
        {
            return Err(FolderError::OtherOwner { owner });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn folders_of_other_users_are_rejected() {
        let other = Err(FolderError::OtherOwner { owner: 7 });
        let cases = [
            // Case, owner, mode, mode of the parent, result for user 5.
            ("own folder in /tmp", 5, 0o700, 0o1777, Ok(())),
            ("own folder, group may write", 5, 0o2770, 0o755, Ok(())),
            ("folder of root", 0, 0o755, 0o755, Ok(())),
            ("volume of a pod", 0, 0o777, 0o755, Ok(())),
            ("/tmp itself", 0, 0o1777, 0o755, Err(FolderError::Shared)),
            ("folder of another user in /tmp", 7, 0o777, 0o1777, other),
            (
                "folder of another user in /tmp, not writable by others",
                7,
                0o755,
                0o1777,
                other,
            ),
            (
                "folder of another user, writable by a group",
                7,
                0o775,
                0o755,
                other,
            ),
            ("mounted folder of another user", 7, 0o755, 0o755, Ok(())),
        ];
        for (case, owner, mode, parent_mode, expected) in cases {
            assert_eq!(
                FolderAccess {
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
    fn new_folder_is_writable_by_its_owner_only() {
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
