//! Placeholder tokens of multimodal objects.
//!
//! An engine reports placeholder tokens and, per block, the objects behind them. They enter the
//! block hash in one of two forms. In the native form, the object hash is appended to the block. In
//! the padded form, every placeholder is replaced by a pad token derived from the object hash.
//! Requests and events use this code, so both choose the same form for every block.

use super::hash::{
    BlockHashes, BlockWindows, LocalHash, PromptContent, SequenceHash, local_hashes,
};
use super::multimodal::{ObjectHash, PromptObject};
use crate::worker::BlockSize;

/// Placeholder tokens of a model, if known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaTokens {
    /// Placeholder token of images.
    pub image: Option<u32>,
    /// Placeholder token of videos.
    pub video: Option<u32>,
}

/// Hashes a prompt with objects in the same way as the events of an engine with these placeholders.
pub fn prompt_hashes(
    content: &PromptContent<'_>,
    block_size: BlockSize,
    media: MediaTokens,
) -> BlockHashes {
    resume_hashes(content, block_size, media, &[])
}

/// Like [`prompt_hashes`], with known hashes of the leading blocks. Hashes only the blocks after
/// them, and all blocks from the first object on. The known hashes must be those of a prompt with
/// the same leading blocks, salt, block size and windows.
pub fn resume_hashes(
    content: &PromptContent<'_>,
    block_size: BlockSize,
    media: MediaTokens,
    known: &[(LocalHash, SequenceHash)],
) -> BlockHashes {
    if content.objects.is_empty() {
        let known = &known[..known
            .len()
            .min(content.windows.blocks(content.tokens.len(), block_size))];
        let rest = PromptContent {
            tokens: &content.tokens[known.len() * block_size.tokens()..],
            ..*content
        };
        return BlockHashes::continue_with_text(known, content.tokens.len(), &rest, block_size);
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
    let rest = PromptContent {
        tokens: &content.tokens[from..],
        objects: &objects,
        ..*content
    };
    BlockHashes::continue_with_locals(
        known,
        content.tokens.len(),
        block_size,
        &prompt_local_hashes(&rest, block_size, media),
    )
}

fn prompt_local_hashes(
    content: &PromptContent<'_>,
    block_size: BlockSize,
    media: MediaTokens,
) -> Vec<LocalHash> {
    let mut objects = object_hashes_by_block(content, block_size);
    let padded = match content.windows {
        BlockWindows::Plain if !objects.is_empty() => {
            substitute_pads(content.tokens, &mut objects, block_size, media)
        }
        BlockWindows::Plain | BlockWindows::Eagle => None,
    };
    let tokens = padded.as_deref().unwrap_or(content.tokens);
    local_hashes(tokens, block_size, content.salt, content.windows, &objects)
}

/// Returns the objects that overlap the window of each block, in their order. As in engines, an
/// object with several ranges in a block is listed several times.
fn object_hashes_by_block(content: &PromptContent<'_>, block_size: BlockSize) -> Vec<Vec<u64>> {
    let lookahead = match content.windows {
        BlockWindows::Plain => 0,
        BlockWindows::Eagle => 1,
    };
    let mut places: Vec<_> = content
        .objects
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
    let mut blocks = vec![Vec::new(); content.tokens.len().div_ceil(size)];
    for (range, object) in places {
        let start = range.start.saturating_sub(lookahead) / size;
        let end = range.end.div_ceil(size).min(blocks.len());
        for block in blocks.get_mut(start..end).unwrap_or_default() {
            block.push(object.0);
        }
    }
    blocks
}

/// Replaces placeholders with pad tokens, block by block, and removes the objects of the blocks
/// that were replaced. Other blocks keep the native form. Returns `None` if no block changed.
pub fn substitute_pads(
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
        let runs = placeholder_runs(block, image, media.video);
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

/// Returns the positions of the placeholders in a block, each with the index of its object. Every
/// run of image placeholders is one object. Neighbouring runs of video placeholders are one object.
fn placeholder_runs(block: &[u32], image: u32, video: Option<u32>) -> Vec<(usize, usize)> {
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
    use crate::block::CacheSalt;

    #[test]
    fn native_and_padded_hashes_match_events() {
        let size = BlockSize::new(4).unwrap();
        let salt = CacheSalt::default();
        let object = |hash, start: usize, end: usize| PromptObject {
            object: ObjectHash(hash),
            ranges: std::iter::once(start..end).collect(),
        };
        let tokens = [5, 9, 9, 9, 9, 5, 9, 9, 5, 9, 5, 9];
        // The block contains the second object twice.
        let objects = [
            object(1, 1, 5),
            object(2, 6, 8),
            object(3, 9, 10),
            object(3, 11, 12),
        ];
        let content = PromptContent {
            objects: &objects,
            ..PromptContent::text(&tokens, &salt)
        };
        let native = local_hashes(
            &tokens,
            size,
            &salt,
            BlockWindows::Plain,
            &[vec![1], vec![1, 2], vec![3, 3]],
        );
        assert_eq!(
            prompt_hashes(&content, size, MediaTokens::default()).locals(),
            native
        );
        let media = MediaTokens {
            image: Some(9),
            video: None,
        };
        let a = ObjectHash(1).pad_token();
        let b = ObjectHash(2).pad_token();
        let c = ObjectHash(3).pad_token();
        let padded = local_hashes(
            &[5, a, a, a, a, 5, b, b, 5, c, 5, c],
            size,
            &salt,
            BlockWindows::Plain,
            &[],
        );
        assert_eq!(prompt_hashes(&content, size, media).locals(), padded);
        let text = PromptContent::text(&tokens, &salt);
        assert_eq!(
            prompt_hashes(&text, size, media),
            BlockHashes::from_tokens(&tokens, size, &salt)
        );
    }

    #[test]
    fn placeholders_with_objects_become_pads() {
        let size = BlockSize::new(4).unwrap();
        let image_only = MediaTokens {
            image: Some(9),
            video: None,
        };
        let video = MediaTokens {
            image: Some(9),
            video: Some(8),
        };
        let a = ObjectHash(1).pad_token();
        let b = ObjectHash(2).pad_token();
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
                substitute_pads(tokens, &mut objects, size, media),
                expected,
                "{tokens:?}"
            );
            assert_eq!(objects.iter().all(Vec::is_empty), expected.is_some());
        }
    }

    #[test]
    fn resumed_hashes_equal_hashes_from_the_start() {
        let tokens: Vec<u32> = (0..70)
            .map(|at| {
                if (31..40).contains(&at) {
                    9
                } else {
                    at * 7919 % 151 + 10
                }
            })
            .collect();
        let salt = CacheSalt {
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
        for windows in [BlockWindows::Plain, BlockWindows::Eagle] {
            for size in [1, 3, 16, 64, 100].map(|size| BlockSize::new(size).expect("not zero")) {
                for (length, objects) in (0..=31)
                    .chain(40..=tokens.len())
                    .flat_map(|at| [(at, &objects[..]), (at, &[])])
                {
                    let objects = if length < 40 { &[] } else { objects };
                    let content = PromptContent {
                        windows,
                        objects,
                        ..PromptContent::text(&tokens[..length], &salt)
                    };
                    let whole = prompt_hashes(&content, size, media);
                    assert_eq!(whole.len(), windows.blocks(length, size));
                    let pairs: Vec<_> = whole
                        .locals()
                        .iter()
                        .copied()
                        .zip(whole.sequences().iter().copied())
                        .collect();
                    for known in 0..=pairs.len() {
                        let resumed = resume_hashes(&content, size, media, &pairs[..known]);
                        assert_eq!(resumed, whole, "{windows:?} {size:?} {length} {known}");
                    }
                    if objects.is_empty() {
                        assert_eq!(whole, BlockHashes::from_content(&content, size));
                    }
                }
            }
        }
    }
}
