//! Causes of an error. The outermost error of an HTTP client says only that sending failed.

use std::error::Error;
use std::io;
use std::iter::successors;

use rustix::io::Errno;

/// Iterates over an error and its causes, from the outermost to the innermost.
pub fn causes<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    successors(Some(error), |&error| error.source())
}

/// Returns the innermost cause of an error, which is the error itself if it has no cause.
pub fn innermost_cause<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    causes(error).last().unwrap_or(error)
}

/// Formats an error with its causes, separated by colons.
pub fn join_causes(error: &(dyn Error + 'static)) -> String {
    let texts: Vec<String> = causes(error).map(ToString::to_string).collect();
    texts.join(": ")
}

/// Formats an error with its causes and, if the process, its permissions or the host caused it, with
/// the fix. A lack of a resource comes first, because the file in the error is not at fault.
pub fn describe_failure(error: &anyhow::Error) -> String {
    match process_fix(error.as_ref()) {
        Some(fix) if is_resource_exhausted(error.as_ref()) => format!("{fix} ({error:#})"),
        Some(fix) => format!("{error:#}; {fix}"),
        None => format!("{error:#}"),
    }
}

/// Returns the fix of an error that the process, its permissions or the host caused. Returns `None`
/// for all other errors.
pub fn process_fix(error: &(dyn Error + 'static)) -> Option<&'static str> {
    match errno(error)? {
        Errno::MFILE => Some(
            "the process has reached its limit of file descriptors; start warmroute with a higher \
            `ulimit -n` (`LimitNOFILE=` in the systemd unit)",
        ),
        Errno::NFILE => Some(
            "the host has reached its limit of open files; raise `fs.file-max`, or stop other \
            processes",
        ),
        Errno::NOMEM | Errno::NOBUFS => Some(
            "the host or the container has no free memory; raise its memory limit (docs/memory.md)",
        ),
        Errno::ACCESS | Errno::PERM => Some(
            "the user of the process has no permission; change the owner or the mode, or run \
            warmroute as another user",
        ),
        Errno::ADDRINUSE => Some(
            "another process uses the address; stop that process, or change the address in the \
            configuration",
        ),
        _ => None,
    }
}

/// Returns whether the process or the host lacks a resource, so that any operation may fail.
pub fn is_resource_exhausted(error: &(dyn Error + 'static)) -> bool {
    matches!(
        errno(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
    )
}

/// Returns the error number of the outermost I/O error of the operating system.
fn errno(error: &(dyn Error + 'static)) -> Option<Errno> {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .find_map(Errno::from_io_error)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("sending failed")]
    struct OuterError(#[source] io::Error);

    #[test]
    fn process_errors_have_fixes() {
        let of = |errno: Errno| OuterError(errno.into());
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert!(process_fix(&of(errno)).is_some() && is_resource_exhausted(&of(errno)));
        }
        for errno in [Errno::ACCESS, Errno::PERM, Errno::ADDRINUSE] {
            assert!(process_fix(&of(errno)).is_some() && !is_resource_exhausted(&of(errno)));
        }
        assert_eq!(process_fix(&of(Errno::NOENT)), None);
        assert_eq!(process_fix(&io::Error::other("plain")), None);

        let text = |errno| describe_failure(&anyhow::Error::new(of(errno)));
        assert!(text(Errno::MFILE).starts_with("the process has reached its limit of file"));
        assert!(text(Errno::ACCESS).starts_with("sending failed: Permission denied"));
        assert!(text(Errno::NOENT).ends_with("(os error 2)"));
    }

    #[test]
    fn causes_are_joined_from_the_outermost() {
        let refused = OuterError(io::Error::new(ErrorKind::ConnectionRefused, "refused"));
        assert_eq!(join_causes(&refused), "sending failed: refused");
        let innermost = innermost_cause(&refused).downcast_ref::<io::Error>();
        assert_eq!(innermost.unwrap().kind(), ErrorKind::ConnectionRefused);

        let plain = io::Error::other("plain");
        assert_eq!(join_causes(&plain), "plain");
        assert_eq!(innermost_cause(&plain).to_string(), "plain");
    }
}
