//! Number of tokens of an image.

use std::num::NonZeroU32;
use std::path::Path;

use serde::Deserialize;
use warmroute_settings::read_regular_file;

use super::config::ImageRule;
use super::image_header::ImageHeader;
use crate::prompt::model_files::MAX_MODEL_FILE;

/// Maximum aspect ratio. Engines reject images with a larger one.
const MAX_ASPECT_RATIO: u64 = 200;

/// Rule for the number of tokens of an item, with all parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MediaTokenCounter {
    Fixed(usize),
    Patches(PatchGrid),
}

/// Patch parameters of an image model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PatchGrid {
    /// Side length of a token in pixels.
    pub(super) side: u64,
    pub(super) min_pixels: u64,
    pub(super) max_pixels: u64,
}

/// Parameters in the model's `preprocessor_config.json`.
#[derive(Deserialize)]
struct PreprocessorFile {
    image_processor_type: Option<String>,
    patch_size: Option<NonZeroU32>,
    merge_size: Option<NonZeroU32>,
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    size: Option<EdgeLimits>,
}

#[derive(Default, Deserialize)]
struct EdgeLimits {
    shortest_edge: Option<u64>,
    longest_edge: Option<u64>,
}

impl MediaTokenCounter {
    /// Creates the rule of a constant number.
    pub(super) fn fixed(tokens: NonZeroU32) -> Self {
        Self::Fixed(tokens.get() as usize)
    }

    /// Resolves the configured rule of images with the parameters of its file.
    pub(super) fn from_image_rule(rule: &ImageRule) -> Result<Self, String> {
        let path = match (rule.tokens_per_item, &rule.preprocessor_config) {
            (Some(tokens), _) => return Ok(Self::fixed(tokens)),
            (None, Some(path)) => path,
            (None, None) => return Err("the number of tokens of an image is unknown".to_owned()),
        };
        let file = read_preprocessor(path)?;
        let edges = file.size.unwrap_or_default();
        let missing = |what: &str| format!("{}: `{what}` is missing", path.display());
        let patch = file.patch_size.ok_or_else(|| missing("patch_size"))?;
        let merge = file.merge_size.ok_or_else(|| missing("merge_size"))?;
        let min = file.min_pixels.or(edges.shortest_edge);
        let max = file.max_pixels.or(edges.longest_edge);
        Ok(Self::Patches(PatchGrid {
            side: u64::from(patch.get()) * u64::from(merge.get()),
            min_pixels: min.ok_or_else(|| missing("min_pixels"))?,
            max_pixels: max.ok_or_else(|| missing("max_pixels"))?,
        }))
    }

    /// Returns true if the count depends on the image size.
    pub(super) fn needs_size(self) -> bool {
        matches!(self, Self::Patches(_))
    }

    /// Returns the number of tokens of an item.
    pub(super) fn count_tokens(self, picture: Option<ImageHeader>) -> Option<usize> {
        match (self, picture) {
            (Self::Fixed(tokens), _) => Some(tokens),
            (Self::Patches(patches), Some(picture)) => {
                patches.count_tokens(picture.width.into(), picture.height.into())
            }
            (Self::Patches(_), None) => None,
        }
    }
}

fn read_preprocessor(path: &Path) -> Result<PreprocessorFile, String> {
    let failed = |problem: String| format!("{}: {problem}", path.display());
    let bytes =
        read_regular_file(path, MAX_MODEL_FILE).map_err(|error| failed(error.to_string()))?;
    let file: PreprocessorFile =
        serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))?;
    match &file.image_processor_type {
        Some(other) if !other.starts_with("Qwen2VLImageProcessor") => Err(failed(format!(
            "an image processor `{other}` is not supported by the rule `qwen2_vl`"
        ))),
        _ => Ok(file),
    }
}

impl PatchGrid {
    /// Returns the number of tokens of an image. Reproduces the arithmetic of `smart_resize` in
    /// transformers: rounding half to even, and square roots as doubles.
    fn count_tokens(self, width: u64, height: u64) -> Option<usize> {
        let short = width.min(height);
        let long = width.max(height);
        if short == 0 || long > MAX_ASPECT_RATIO * short {
            return None;
        }
        let w = width as f64;
        let h = height as f64;
        let side = self.side as f64;
        let whole = |length: f64| (length / side).round_ties_even() * side;
        let mut wide = whole(w);
        let mut high = whole(h);
        if wide * high > self.max_pixels as f64 {
            let beta = (h * w / self.max_pixels as f64).sqrt();
            let reduced = |length: f64| (side).max((length / beta / side).floor() * side);
            (wide, high) = (reduced(w), reduced(h));
        } else if wide * high < self.min_pixels as f64 {
            let beta = (self.min_pixels as f64 / (h * w)).sqrt();
            let enlarged = |length: f64| (length * beta / side).ceil() * side;
            (wide, high) = (enlarged(w), enlarged(h));
        }
        let tokens = (wide / side) * (high / side);
        // No model has a larger context.
        (tokens <= f64::from(1 << 24)).then_some(tokens as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_token_count_matches_transformers() {
        let small = PatchGrid {
            side: 28,
            min_pixels: 3136,
            max_pixels: 200_704,
        };
        for (width, height, tokens) in SIZES {
            assert_eq!(
                small.count_tokens(width, height),
                tokens,
                "{width}x{height}"
            );
        }
    }

    /// Width, height and number of tokens, computed by `smart_resize` of transformers 5.19.
    const SIZES: [(u64, u64, Option<usize>); 18] = [
        (1, 1, Some(4)),
        (28, 28, Some(4)),
        (42, 42, Some(4)),
        (70, 98, Some(8)),
        (43, 41, Some(6)),
        (280, 280, Some(100)),
        (448, 448, Some(256)),
        (449, 447, Some(256)),
        (463, 433, Some(255)),
        (640, 480, Some(234)),
        (1000, 5, Some(29)),
        (400, 2, Some(29)),
        (401, 2, None),
        (2000, 1500, Some(234)),
        (1920, 1080, Some(252)),
        (3000, 28, Some(107)),
        (5, 900, Some(27)),
        (37, 100, Some(4)),
    ];
}
