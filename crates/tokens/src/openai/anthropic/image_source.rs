//! Sources of images in Anthropic requests.

use serde::Deserialize;

use crate::openai::content_part::{ContentPart, MediaItem, MediaModality, MediaSource};
use crate::openai::json::JsonValue;

/// Source of an image: a URL or base64 data.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ImageSource {
    #[serde(rename = "type")]
    kind: Option<String>,
    url: Option<String>,
    data: Option<String>,
}

impl ImageSource {
    pub(super) fn from_json(source: &JsonValue) -> Self {
        let text = |key| {
            source
                .get(key)
                .and_then(JsonValue::as_str)
                .map(str::to_owned)
        };
        Self {
            kind: text("type"),
            url: text("url"),
            data: text("data"),
        }
    }

    pub(super) fn into_part(self) -> ContentPart {
        let source = match self.kind.as_deref() {
            Some("url") => MediaSource::Url(self.url.unwrap_or_default()),
            _ => MediaSource::Base64(self.data.unwrap_or_default()),
        };
        ContentPart::from_media(MediaItem {
            modality: MediaModality::Image,
            source: Some(source),
            uuid: None,
        })
    }
}
