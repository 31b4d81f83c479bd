//! The engine's name for an image: vLLM hashes the bytes as they were sent, with the model it runs, in frames that tell
//! where each part ends (`multimodal/hasher.py` of 0.32). Where it converted the image, the name says so as well.

use super::content;

const SEQUENCE: u8 = 1;
const MAPPING: u8 = 2;
const LEAF: u8 = 3;

/// The name of an image; `None` if its content is no base64.
pub(super) fn of_image(model: &str, is_rgb: bool, base64: &str) -> Option<String> {
    let length = content::length(base64)?;
    let mut name = Name(blake3::Hasher::new());
    name.text("image");
    name.tag(LEAF);
    name.text("image");
    if is_rgb {
        name.tag(LEAF);
    } else {
        // The mode it was converted to, and what shines through where it is transparent: white.
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
    content::pieces(base64, |bytes| {
        name.0.update(bytes);
    })?;
    name.text("model_id");
    name.tag(LEAF);
    name.text(model);
    Some(name.0.finalize().to_hex().to_string())
}

struct Name(blake3::Hasher);

impl Name {
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
