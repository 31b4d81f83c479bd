//! The placeholders of objects in a token stream. An engine reports placeholder tokens and, per block, the objects that fill
//! them. They enter a block's hash in one of two forms: the object's hash is appended to the block (native), or every
//! placeholder is replaced by a pad token made of that hash. Requests and events go through the same code here, so that
//! both sides take the same form for every block.

use super::hash::{BlockHashes, Content, LocalHash, SequenceHash, Windows, locals};
use super::multimodal::{ObjectHash, PromptObject};
use crate::worker::BlockSize;

/// Placeholder tokens of the model, where they are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaTokens {
    /// Placeholder of an image.
    pub image: Option<u32>,
    /// Placeholder of a video.
    pub video: Option<u32>,
}

/// The blocks of a prompt with objects, as the events of an engine that has these placeholders are hashed.
pub fn hashes(content: &Content<'_>, block_size: BlockSize, media: MediaTokens) -> BlockHashes {
    resumed(content, block_size, media, &[])
}

/// The same where those of the first blocks are known: only what follows them is hashed, and whatever is not before the first
/// object. They must come from a prompt that begins with the same blocks, under the same salt, block size and windows.
pub fn resumed(
    content: &Content<'_>,
    block_size: BlockSize,
    media: MediaTokens,
    known: &[(LocalHash, SequenceHash)],
) -> BlockHashes {
    if content.objects.is_empty() {
        let known = &known[..known
            .len()
            .min(content.windows.blocks(content.tokens.len(), block_size))];
        let rest = Content {
            tokens: &content.tokens[known.len() * block_size.tokens()..],
            ..*content
        };
        return BlockHashes::after_text(known, content.tokens.len(), &rest, block_size);
    }
    let ranges = || {
        content
            .objects
            .iter()
            .flat_map(|object| &object.ranges)
            .filter(|range| !range.is_empty())
    };
    let first = ranges()
        .map(|range| range.start)
        .min()
        .unwrap_or(content.tokens.len())
        .min(content.tokens.len());
    let known = &known[..known.len().min(content.windows.blocks(first, block_size))];
    let from = known.len() * block_size.tokens();
    let behind = |object: &PromptObject| {
        let ranges = object.ranges.iter().filter(|range| !range.is_empty());
        PromptObject {
            ranges: ranges
                .map(|range| range.start - from..range.end - from)
                .collect(),
            ..object.clone()
        }
    };
    let objects: Vec<PromptObject> = content.objects.iter().map(behind).collect();
    let rest = Content {
        tokens: &content.tokens[from..],
        objects: &objects,
        ..*content
    };
    BlockHashes::after(
        known,
        (content.tokens.len(), block_size),
        &locals_of(&rest, block_size, media),
    )
}

fn locals_of(content: &Content<'_>, block_size: BlockSize, media: MediaTokens) -> Vec<LocalHash> {
    let mut objects = marks(content.tokens.len(), block_size, content.objects);
    let padded = match content.windows {
        Windows::Plain if !objects.is_empty() => {
            normalize(content.tokens, &mut objects, block_size, media)
        }
        Windows::Plain | Windows::Eagle => None,
    };
    let tokens = padded.as_deref().unwrap_or(content.tokens);
    locals(tokens, block_size, content.salt, content.windows, &objects)
}

/// Per block, the objects that touch it in their order; one that stands there twice is named twice, as engines do.
fn marks(tokens: usize, block_size: BlockSize, objects: &[PromptObject]) -> Vec<Vec<u64>> {
    let mut places: Vec<_> = objects
        .iter()
        .flat_map(|object| {
            object
                .ranges
                .iter()
                .filter(|range| !range.is_empty())
                .map(|range| (range, object.object))
        })
        .collect();
    if places.is_empty() {
        return Vec::new();
    }
    places.sort_by_key(|(range, _)| range.start);
    let size = block_size.tokens();
    let mut blocks = vec![Vec::new(); tokens.div_ceil(size)];
    for (range, object) in places {
        let end = range.end.div_ceil(size).min(blocks.len());
        for block in blocks.get_mut(range.start / size..end).unwrap_or_default() {
            block.push(object.0);
        }
    }
    blocks
}

/// Replaces placeholders by pad tokens, block by block, and takes the objects of every block where that succeeded; the
/// others keep the native form. `None` if no block changed.
pub fn normalize(
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
        let Some(&(_, last)) = runs.last() else {
            continue;
        };
        let exact = last + 1 == objects.len();
        if objects.is_empty() || (media.video.is_some() && !exact) {
            continue;
        }
        let padded = padded.get_or_insert_with(|| tokens.to_vec());
        for (at, object) in runs {
            padded[start + at] = ObjectHash(objects[object.min(objects.len() - 1)]).pad_token();
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
    use crate::block::Salt;

    #[test]
    fn both_forms_of_a_prompt_are_those_of_the_events() {
        let size = BlockSize::new(4).unwrap();
        let salt = Salt::default();
        let object = |hash, start: usize, end: usize| PromptObject {
            object: ObjectHash(hash),
            ranges: std::iter::once(start..end).collect(),
        };
        let tokens = [5, 9, 9, 9, 9, 5, 9, 9, 5, 9, 5, 9];
        // The second stands in its block twice.
        let objects = [
            object(1, 1, 5),
            object(2, 6, 8),
            object(3, 9, 10),
            object(3, 11, 12),
        ];
        let content = Content {
            objects: &objects,
            ..Content::plain(&tokens, &salt)
        };
        let native = locals(
            &tokens,
            size,
            &salt,
            Windows::Plain,
            &[vec![1], vec![1, 2], vec![3, 3]],
        );
        assert_eq!(
            hashes(&content, size, MediaTokens::default()).locals(),
            native
        );
        let media = MediaTokens {
            image: Some(9),
            video: None,
        };
        let (a, b, c) = (
            ObjectHash(1).pad_token(),
            ObjectHash(2).pad_token(),
            ObjectHash(3).pad_token(),
        );
        let padded = locals(
            &[5, a, a, a, a, 5, b, b, 5, c, 5, c],
            size,
            &salt,
            Windows::Plain,
            &[],
        );
        assert_eq!(hashes(&content, size, media).locals(), padded);
        let text = Content::plain(&tokens, &salt);
        assert_eq!(
            hashes(&text, size, media),
            BlockHashes::of(&tokens, size, &salt)
        );
    }

    #[test]
    fn placeholders_become_pads_where_objects_explain_them() {
        let size = BlockSize::new(4).unwrap();
        let image_only = MediaTokens {
            image: Some(9),
            video: None,
        };
        let video = MediaTokens {
            image: Some(9),
            video: Some(8),
        };
        let (a, b) = (ObjectHash(1).pad_token(), ObjectHash(2).pad_token());
        type Case<'a> = (&'a [u32], &'a [&'a [u64]], MediaTokens, Option<Vec<u32>>);
        let cases: [Case<'_>; 7] = [
            (&[5, 9, 9, 5], &[&[1]], image_only, Some(vec![5, a, a, 5])),
            (
                &[9, 5, 9, 5],
                &[&[1, 2]],
                image_only,
                Some(vec![a, 5, b, 5]),
            ),
            (&[9, 5, 9, 5], &[&[1]], image_only, Some(vec![a, 5, a, 5])),
            (&[9, 5, 9, 5], &[&[1]], video, None),
            (&[8, 5, 8, 5], &[&[1]], video, Some(vec![a, 5, a, 5])),
            (
                &[5, 5, 9, 9, 9, 9, 9, 9],
                &[&[1], &[1]],
                image_only,
                Some(vec![5, 5, a, a, a, a, a, a]),
            ),
            (&[5, 5, 5, 5], &[&[1]], image_only, None),
        ];
        for (tokens, objects, media, expected) in cases {
            let mut objects: Vec<Vec<u64>> = objects.iter().map(|block| block.to_vec()).collect();
            assert_eq!(
                normalize(tokens, &mut objects, size, media),
                expected,
                "{tokens:?}"
            );
            assert_eq!(objects.iter().all(Vec::is_empty), expected.is_some());
        }
    }

    #[test]
    fn a_chain_goes_on_from_any_block_as_if_it_had_begun_at_the_first() {
        let tokens: Vec<u32> = (0..70)
            .map(|at| {
                if (31..40).contains(&at) {
                    9
                } else {
                    at * 7919 % 151 + 10
                }
            })
            .collect();
        let salt = Salt {
            lora: Some("adapter".into()),
            cache: Some("tenant".into()),
        };
        let objects = [PromptObject {
            object: ObjectHash(7),
            ranges: vec![31..40, 3..3],
        }];
        let media = MediaTokens {
            image: Some(9),
            video: None,
        };
        for windows in [Windows::Plain, Windows::Eagle] {
            for size in [1, 3, 16, 64, 100].map(|size| BlockSize::new(size).expect("not zero")) {
                for (length, objects) in (0..=31)
                    .chain(40..=tokens.len())
                    .flat_map(|at| [(at, &objects[..]), (at, &[])])
                {
                    let objects = if length < 40 { &[] } else { objects };
                    let content = Content {
                        windows,
                        objects,
                        ..Content::plain(&tokens[..length], &salt)
                    };
                    let whole = hashes(&content, size, media);
                    assert_eq!(whole.len(), windows.blocks(length, size));
                    let pairs: Vec<_> = whole
                        .locals()
                        .iter()
                        .copied()
                        .zip(whole.sequences().iter().copied())
                        .collect();
                    for known in 0..=pairs.len() {
                        let resumed = resumed(&content, size, media, &pairs[..known]);
                        assert_eq!(resumed, whole, "{windows:?} {size:?} {length} {known}");
                    }
                    if objects.is_empty() {
                        assert_eq!(whole, BlockHashes::of_content(&content, size));
                    }
                }
            }
        }
    }
}
