//! Multimodal objects in a token stream. An engine reports placeholder tokens and, per block, the objects that fill them;
//! the router sees the request, where an object is an identifier. Both sides agree by one of two forms: the object's
//! hash is appended to the block (native), or every placeholder is replaced by a pad token made of that hash.

use xxhash_rust::xxh3::xxh3_64;

use crate::worker::BlockSize;

/// First pad token; real vocabularies end below.
const PAD_BASE: u32 = 1_000_000;

/// Placeholder tokens of the model, where they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaTokens {
    /// Placeholder of an image.
    pub image: Option<u32>,
    /// Placeholder of a video.
    pub video: Option<u32>,
}

/// The hash of an object's identifier: a content digest is shortened, any other name hashed, an empty one is none.
pub fn identifier_hash(identifier: &str) -> Option<u64> {
    if identifier.is_empty() {
        return None;
    }
    Some(digest(identifier).unwrap_or_else(|| xxh3_64(identifier.as_bytes())))
}

/// The token that stands for an object in the pad form.
pub fn pad_token(object: u64) -> u32 {
    // Masked to 30 bits, so neither the cast nor the addition loses anything.
    PAD_BASE + (object & 0x3fff_ffff) as u32
}

/// The first 16 of exactly 64 hex digits.
pub(super) fn digest(text: &str) -> Option<u64> {
    let hex = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    hex.then(|| u64::from_str_radix(&text[..16], 16).ok()).flatten()
}

/// The hash in the form by which routers of the field hand it through an engine: 16 lowercase hex digits and 48 zeros.
pub(super) fn marker(text: &str) -> Option<u64> {
    let zeros = text.get(16..).is_some_and(|tail| tail.bytes().all(|byte| byte == b'0'));
    let lowercase = !text.bytes().any(|byte| byte.is_ascii_uppercase());
    if zeros && lowercase { digest(text) } else { None }
}

/// Replaces placeholders by pad tokens, block by block, and takes the objects of every block where that succeeded; the
/// others keep the native form. `None` if no block changed.
pub(super) fn normalize(
    tokens: &[u32],
    objects: &mut [Vec<u64>],
    block_size: BlockSize,
    media: MediaTokens,
) -> Option<Vec<u32>> {
    let image = media.image?;
    if media.video == Some(image) {
        return None;
    }
    let mut padded = None;
    let starts = (0..tokens.len()).step_by(block_size.tokens());
    for (start, objects) in starts.zip(objects) {
        let block = &tokens[start..tokens.len().min(start + block_size.tokens())];
        let runs = runs(block, image, media.video);
        let Some(&(_, last)) = runs.last() else { continue };
        let exact = last + 1 == objects.len();
        if objects.is_empty() || (media.video.is_some() && !exact) {
            continue;
        }
        let padded = padded.get_or_insert_with(|| tokens.to_vec());
        for (at, object) in runs {
            padded[start + at] = pad_token(objects[object.min(objects.len() - 1)]);
        }
        objects.clear();
    }
    padded
}

/// The placeholders of a block with the number of the object each belongs to: every run of images is one object,
/// neighbouring runs of video frames are one together.
fn runs(block: &[u32], image: u32, video: Option<u32>) -> Vec<(usize, usize)> {
    let mut placeholders: Vec<(usize, usize)> = Vec::new();
    let mut last_token = None;
    for (at, &token) in block.iter().enumerate() {
        if token != image && Some(token) != video {
            continue;
        }
        let object = match placeholders.last() {
            None => 0,
            Some(&(before, object)) => {
                let same = last_token == Some(token) && (token != image || before + 1 == at);
                if same { object } else { object + 1 }
            }
        };
        placeholders.push((at, object));
        last_token = Some(token);
    }
    placeholders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_hash_by_their_form() {
        let digest = "0123456789ABCDEF00112233445566778899aabbccddeefffedcba9876543210";
        let cases = [
            ("", None),
            (digest, Some(0x0123_4567_89ab_cdef)),
            (&digest[..63], Some(xxh3_64(&digest.as_bytes()[..63]))),
            ("cat.png", Some(xxh3_64(b"cat.png"))),
        ];
        for (identifier, expected) in cases {
            assert_eq!(identifier_hash(identifier), expected, "{identifier:?}");
        }
    }

    #[test]
    fn only_sixteen_lowercase_digits_and_zeros_are_a_marker() {
        let zeros = "0".repeat(48);
        assert_eq!(marker(&format!("00000000000000ab{zeros}")), Some(0xab));
        assert_eq!(marker(&format!("00000000000000AB{zeros}")), None);
        assert_eq!(marker(&format!("00000000000000ab1{}", &zeros[1..])), None);
        assert_eq!(marker("é".repeat(32).as_str()), None);
    }

    #[test]
    fn placeholders_become_pads_where_objects_explain_them() {
        let size = BlockSize::new(4).unwrap();
        let image_only = MediaTokens { image: Some(9), video: None };
        let video = MediaTokens { image: Some(9), video: Some(8) };
        let (a, b) = (pad_token(1), pad_token(2));
        type Case<'a> = (&'a [u32], &'a [&'a [u64]], MediaTokens, Option<Vec<u32>>);
        let cases: [Case<'_>; 7] = [
            (&[5, 9, 9, 5], &[&[1]], image_only, Some(vec![5, a, a, 5])),
            (&[9, 5, 9, 5], &[&[1, 2]], image_only, Some(vec![a, 5, b, 5])),
            (&[9, 5, 9, 5], &[&[1]], image_only, Some(vec![a, 5, a, 5])),
            (&[9, 5, 9, 5], &[&[1]], video, None),
            (&[8, 5, 8, 5], &[&[1]], video, Some(vec![a, 5, a, 5])),
            (&[5, 5, 9, 9, 9, 9, 9, 9], &[&[1], &[1]], image_only, Some(vec![5, 5, a, a, a, a, a, a])),
            (&[5, 5, 5, 5], &[&[1]], image_only, None),
        ];
        for (tokens, objects, media, expected) in cases {
            let mut objects: Vec<Vec<u64>> = objects.iter().map(|block| block.to_vec()).collect();
            assert_eq!(normalize(tokens, &mut objects, size, media), expected, "{tokens:?}");
            assert_eq!(objects.iter().all(Vec::is_empty), expected.is_some());
        }
    }
}
