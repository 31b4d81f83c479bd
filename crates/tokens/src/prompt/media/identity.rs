//! The engine's id of an image. vLLM hashes the original bytes and the model in length-prefixed
//! frames (`multimodal/hasher.py` of 0.32). For a converted image, the conversion is part of the
//! hash.

use super::content;

const SEQUENCE: u8 = 1;
const MAPPING: u8 = 2;
const LEAF: u8 = 3;

/// Returns the id of an image, or `None` if its content is not base64.
pub(super) fn image_id(model: &str, is_rgb: bool, base64: &str) -> Option<String> {
    let length = content::decoded_len(base64)?;
    let mut name = ContentHasher(blake3::Hasher::new());
    name.text("image");
    name.tag(LEAF);
    name.text("image");
    if is_rgb {
        name.tag(LEAF);
    } else {
        // The hash includes the target mode of the conversion, and white as the background of
        // transparent images.
        name.container(MAPPING, 2);
        name.text("io_config");
        name.container(MAPPING, 2);
        name.text("image_mode");
        name.tag(LEAF);
        name.text("RGB");
        name.text("rgba_background_color");
        name.container(SEQUENCE, 3);
        for _ in 0..3 {
            name.tag(LEAF);
            name.frame(8);
            name.0.update(&255i64.to_le_bytes());
        }
        name.text("data");
        name.tag(LEAF);
    }
    name.frame(length);
    content::decode_chunks(base64, |bytes| {
        name.0.update(bytes);
    })?;
    name.text("model_id");
    name.tag(LEAF);
    name.text(model);
    Some(name.0.finalize().to_hex().to_string())
}

struct ContentHasher(blake3::Hasher);

impl ContentHasher {
    fn tag(&mut self, tag: u8) {
        self.0.update(&[tag]);
    }

    fn container(&mut self, tag: u8, entries: u64) {
        self.tag(tag);
        self.frame(entries);
    }

    fn frame(&mut self, length: u64) {
        self.0.update(&length.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.frame(text.len() as u64);
        self.0.update(text.as_bytes());
    }
}
