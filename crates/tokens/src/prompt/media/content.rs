//! Content of a media item in a request: base64, possibly in a data URL. It is decoded in chunks
//! and never stored, because it may be most of a large body.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::image_header::{self, ImageHeader};
use crate::openai::MediaSource;

/// The engine accepts optional padding and ignores trailing bits.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Number of characters decoded at once.
const CHUNK_CHARS: usize = 64 * 1024;

/// Numbers of characters that the first and the last attempt search for an image header.
const HEADER_CHARS: [usize; 2] = [16 * 1024, 4 * 1024 * 1024];

/// Returns the base64 text of inline content, or `None` for an external URL.
pub(super) fn base64_of(source: &MediaSource) -> Option<&str> {
    let url = match source {
        MediaSource::Base64(data) => return Some(data),
        MediaSource::Url(url) => url,
    };
    let rest = url
        .get(..5)
        .filter(|scheme| scheme.eq_ignore_ascii_case("data:"))
        .map(|_| &url[5..])?;
    let (head, data) = rest.split_once(',')?;
    let (_, encoding) = head.rsplit_once(';')?;
    (encoding == "base64").then_some(data)
}

/// Returns the number of bytes that a base64 text decodes to. Returns `None` if the length is
/// invalid.
pub(super) fn decoded_len(data: &str) -> Option<u64> {
    let characters = data.trim_end_matches('=').len();
    let left_over = match characters % 4 {
        0 => 0,
        1 => return None,
        over => over - 1,
    };
    u64::try_from(characters / 4 * 3 + left_over).ok()
}

/// Reads the header of an image.
pub(super) fn read_image_header(data: &str) -> Option<ImageHeader> {
    HEADER_CHARS.iter().find_map(|&head| {
        let head = data.get(..data.len().min(head))?;
        let head = BASE64.decode(&head[..head.len() / 4 * 4]).ok()?;
        image_header::read_header(&head)
    })
}

/// Passes the decoded bytes to `on_chunk`. Returns `None` if the text is not base64.
pub(super) fn decode_chunks(data: &str, mut on_chunk: impl FnMut(&[u8])) -> Option<()> {
    let mut buffer = vec![0; CHUNK_CHARS / 4 * 3];
    let mut rest = data.as_bytes();
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.len().min(CHUNK_CHARS));
        // Only the last chunk may end with padding.
        if !after.is_empty() && piece.ends_with(b"=") {
            return None;
        }
        let length = BASE64.decode_slice(piece, &mut buffer).ok()?;
        on_chunk(&buffer[..length]);
        rest = after;
    }
    Some(())
}
