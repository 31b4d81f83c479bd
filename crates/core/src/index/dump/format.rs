//! Identification of the format, and its errors.

/// First bytes of a dump.
pub(super) const MAGIC: [u8; 8] = *b"wrmindex";
/// Version of the format.
pub const VERSION: u16 = 2;

/// Reasons why a dump cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// Reading the bytes failed.
    #[error("the dump cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// The bytes are not a dump.
    #[error("this is not an index dump")]
    Magic,
    /// The dump has another format version.
    #[error("the dump has format version {0}, but only version {VERSION} is supported")]
    Version(u16),
    /// A checksum does not match.
    #[error("the dump is damaged: a checksum does not match")]
    Checksum,
    /// The dump ends early.
    #[error("the dump is truncated")]
    Truncated,
    /// The checksums match, but the content is inconsistent.
    #[error("the dump is inconsistent: {0}")]
    Malformed(&'static str),
}
