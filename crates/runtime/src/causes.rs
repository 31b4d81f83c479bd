//! Causes of an error. The outermost error of an HTTP client says only that sending failed.

use std::error::Error;
use std::iter::successors;

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

#[cfg(test)]
mod tests {
    use std::io::{self, ErrorKind};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("sending failed")]
    struct OuterError(#[source] io::Error);

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
