use serde_json::{Value, json};

use super::*;
use crate::openai::MediaSource;

fn rule<T: serde::de::DeserializeOwned>(json: Value) -> Option<T> {
    Some(serde_json::from_value(json).unwrap())
}

fn rules() -> MediaRules {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/data/tokens/qwen2-vl/preprocessor_config.json"
    );
    let image = json!({"token": "<i>", "placeholder": "<img {i}>", "preprocessor_config": file});
    let config = MediaConfig {
        model: Some("m".to_owned()),
        image: rule(image),
        audio: rule(json!({"token": "<a>", "tokens_per_item": 3})),
        video: None,
    };
    MediaRules::new(&config, "name", |token| {
        ["<i>", "<a>"]
            .iter()
            .position(|known| *known == token)
            .map(|at| at as u32)
    })
    .unwrap()
}

fn known(id: &str, tokens: usize) -> ResolvedMediaItem {
    ResolvedMediaItem {
        id: id.to_owned(),
        tokens,
    }
}

#[test]
fn placeholders_expand_in_order_of_items() {
    let items = vec![
        (MediaModality::Image, known("x", 2)),
        (MediaModality::Audio, known("y", 3)),
        (MediaModality::Image, known("z", 1)),
    ];
    let shown =
        expand_placeholders(vec![7, 0, 7, 1, 0, 7, 0].into(), &items, &rules(), true).unwrap();
    assert_eq!(
        *shown.tokens,
        [7, 0, 0, 7, 1, 1, 1, 0, 7, 0],
        "the last placeholder belongs to no item"
    );
    let places: Vec<_> = shown
        .items
        .iter()
        .map(|item| (item.id.as_str(), item.range.clone()))
        .collect();
    assert_eq!(places, [("x", 1..3), ("y", 4..7), ("z", 7..8)]);
    assert!(shown.is_complete);
    // The third item is unknown, so the tokens end before its placeholder.
    let beginning =
        expand_placeholders(vec![7, 0, 7, 1, 0, 7].into(), &items[..2], &rules(), false).unwrap();
    assert_eq!(
        (&*beginning.tokens, beginning.is_complete),
        (&[7, 0, 0, 7, 1, 1, 1][..], false)
    );
    assert!(
        expand_placeholders(vec![7, 0].into(), &items, &rules(), true).is_err(),
        "two items have no placeholder"
    );
    let many = vec![(MediaModality::Audio, known("y", 1 << 20)); 3];
    assert!(
        expand_placeholders(vec![1, 1, 1].into(), &many, &rules(), true).is_err(),
        "more tokens than any context"
    );
}

fn image(url: &str, uuid: Option<&str>) -> MediaItem {
    let source = Some(MediaSource::Url(url.to_owned()));
    MediaItem {
        modality: MediaModality::Image,
        source,
        uuid: uuid.map(str::to_owned),
    }
}

/// Returns the header of a PNG image with this size and color type.
fn png(width: u32, height: u32, colour: u8) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
    bytes.extend(width.to_be_bytes());
    bytes.extend(height.to_be_bytes());
    bytes.extend([8, colour, 0, 0, 0, 1, 2, 3, 4]);
    bytes
}

fn data_url(bytes: &[u8]) -> String {
    use base64::Engine as _;
    format!(
        "data:image/png;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(bytes)
    )
}

#[test]
fn item_resolves_only_with_id_and_size() {
    let rules = rules();
    let url = data_url(&png(280, 140, 2));
    let here = rules
        .resolve_item(&image(&url, None), &EngineModelName::Unreported)
        .unwrap();
    assert_eq!((here.tokens, here.id.len()), (50, 64));
    assert_eq!(
        rules.resolve_item(&image(&url, Some("mine")), &EngineModelName::Unreported),
        Some(known("mine", 50))
    );
    let grey = data_url(&png(280, 140, 0));
    assert_ne!(
        rules
            .resolve_item(&image(&grey, None), &EngineModelName::Unreported)
            .unwrap()
            .id,
        here.id
    );
    for unknown in [
        image("https://example.com/a.png", None),
        image("https://example.com/a.png", Some("mine")),
        image("data:image/png,AAAA", None),
        image("data:image/png;base64,AAAA", None),
        image(&data_url(&png(0, 140, 2)), None),
        image(&data_url(&png(401, 2, 2)), None),
        image(&format!("{url}="), None),
        MediaItem {
            source: None,
            ..image("", Some("mine"))
        },
        MediaItem {
            modality: MediaModality::Audio,
            ..image(&url, None)
        },
        MediaItem {
            modality: MediaModality::Video,
            ..image(&url, Some("mine"))
        },
    ] {
        assert_eq!(
            rules.resolve_item(&unknown, &EngineModelName::Unreported),
            None,
            "{unknown:?}"
        );
    }
    let sound = MediaItem {
        modality: MediaModality::Audio,
        ..image("https://example.com/a.wav", Some("mine"))
    };
    assert_eq!(
        rules.resolve_item(&sound, &EngineModelName::Unreported),
        Some(known("mine", 3))
    );
    assert_eq!(
        rules.placeholder(MediaModality::Image, 2).as_deref(),
        Some("<img 2>")
    );
}

#[test]
fn chunked_image_id_equals_whole_image_id() {
    let mut bytes = png(28, 28, 2);
    bytes.resize(300_001, 7);
    let url = data_url(&bytes);
    let base64 = &url[22..];
    let mut pieces = Vec::new();
    content::decode_chunks(base64, |piece| pieces.extend_from_slice(piece)).unwrap();
    assert_eq!(pieces, bytes);
    assert_eq!(content::decoded_len(base64), Some(300_001));
    assert_eq!(
        content::decoded_len(base64.trim_end_matches('=')),
        Some(300_001)
    );
    assert_eq!(content::decode_chunks("AA=A", |_| {}), None);
    assert_eq!(content::decoded_len("AAAAA"), None);
}

#[test]
fn media_rules_contradicting_tokenizer_are_rejected() {
    let fixed = |token: &str| json!({"token": token, "tokens_per_item": 1});
    let new = |image: Value, audio: Option<Value>| {
        let config = MediaConfig {
            image: rule(image),
            audio: audio.and_then(rule),
            ..MediaConfig::default()
        };
        MediaRules::new(&config, "m", |token| (token == "a").then_some(1)).map(drop)
    };
    assert!(new(fixed("b"), None).unwrap_err().contains("`b`"));
    assert!(
        new(fixed("a"), Some(fixed("a")))
            .unwrap_err()
            .contains("two modalities")
    );
    assert!(new(fixed("a"), None).is_ok());
}
