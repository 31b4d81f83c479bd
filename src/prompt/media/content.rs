//! The content of an item as a request brings it: base64, perhaps in a data URL. It is decoded piece by piece and never
//! kept, because it may be most of a large body.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::picture::{self, Picture};
use crate::openai::Source;

/// The engine takes padding or none, and whatever bits are left over.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Characters that are decoded at once.
const PIECE: usize = 64 * 1024;

/// Characters in which the header of an image is looked for, first and at last.
const HEADS: [usize; 2] = [16 * 1024, 4 * 1024 * 1024];

/// The base64 text of a content that the request brings along; none of one that lies elsewhere.
pub(super) fn base64_of(source: &Source) -> Option<&str> {
    let url = match source {
        Source::Base64(data) => return Some(data),
        Source::Url(url) => url,
    };
    let rest = url
        .get(..5)
        .filter(|scheme| scheme.eq_ignore_ascii_case("data:"))
        .map(|_| &url[5..])?;
    let (head, data) = rest.split_once(',')?;
    let (_, encoding) = head.rsplit_once(';')?;
    (encoding == "base64").then_some(data)
}

/// Bytes of a base64 text.
pub(super) fn length(data: &str) -> Option<u64> {
    let characters = data.trim_end_matches('=').len();
    let left_over = match characters % 4 {
        0 => 0,
        1 => return None,
        over => over - 1,
    };
    u64::try_from(characters / 4 * 3 + left_over).ok()
}

/// What the header of an image says.
pub(super) fn picture(data: &str) -> Option<Picture> {
    HEADS.iter().find_map(|&head| {
        let head = data.get(..data.len().min(head))?;
        let head = BASE64.decode(&head[..head.len() / 4 * 4]).ok()?;
        picture::read(&head)
    })
}

/// Hands out the bytes piece by piece; `None` if it is no base64.
pub(super) fn pieces(data: &str, mut take: impl FnMut(&[u8])) -> Option<()> {
    let mut buffer = vec![0; PIECE / 4 * 3];
    let mut rest = data.as_bytes();
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.len().min(PIECE));
        // Padding may only end the last piece.
        if !after.is_empty() && piece.ends_with(b"=") {
            return None;
        }
        let length = BASE64.decode_slice(piece, &mut buffer).ok()?;
        take(&buffer[..length]);
        rest = after;
    }
    Some(())
}
