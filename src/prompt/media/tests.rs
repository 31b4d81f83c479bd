use super::*;
use crate::openai::Source;

fn rule(json: &str) -> Option<ItemRule> {
    Some(serde_json::from_str(json).unwrap())
}

fn rules() -> Rules {
    let image = r#"{"token":"<i>","rule":"qwen2_vl","patch_size":14,"merge_size":2,"min_pixels":3136,"max_pixels":200704,
        "placeholder":"<img {i}>"}"#;
    let config = MediaConfig {
        model: Some("m".to_owned()),
        image: rule(image),
        audio: rule(r#"{"token":"<a>","rule":"fixed","tokens":3}"#),
        video: None,
    };
    Rules::new(&config, "name", |token| {
        ["<i>", "<a>"]
            .iter()
            .position(|known| *known == token)
            .map(|at| at as u32)
    })
    .unwrap()
}

fn known(id: &str, tokens: usize) -> Known {
    Known {
        id: id.to_owned(),
        tokens,
    }
}

#[test]
fn placeholders_become_rows_in_the_order_of_the_items_wherever_they_come_from() {
    let items = vec![
        (Modality::Image, known("x", 2)),
        (Modality::Audio, known("y", 3)),
        (Modality::Image, known("z", 1)),
    ];
    let shown = expand(vec![7, 0, 7, 1, 0, 7, 0].into(), &items, &rules(), true).unwrap();
    assert_eq!(
        *shown.tokens,
        [7, 0, 0, 7, 1, 1, 1, 0, 7, 0],
        "the last placeholder stands for nothing"
    );
    let places: Vec<_> = shown
        .items
        .iter()
        .map(|item| (item.id.as_str(), item.range.clone()))
        .collect();
    assert_eq!(places, [("x", 1..3), ("y", 4..7), ("z", 7..8)]);
    assert!(shown.whole);
    // Of which the third is unknown: what stands at its place may be anything.
    let beginning = expand(vec![7, 0, 7, 1, 0, 7].into(), &items[..2], &rules(), false).unwrap();
    assert_eq!(
        (&*beginning.tokens, beginning.whole),
        (&[7, 0, 0, 7, 1, 1, 1][..], false)
    );
    assert!(
        expand(vec![7, 0].into(), &items, &rules(), true).is_err(),
        "two items are shown nowhere"
    );
    let many = vec![(Modality::Audio, known("y", 1 << 20)); 3];
    assert!(
        expand(vec![1, 1, 1].into(), &many, &rules(), true).is_err(),
        "no context is so long"
    );
}

fn image(url: &str, uuid: Option<&str>) -> Media {
    let source = Some(Source::Url(url.to_owned()));
    Media {
        modality: Modality::Image,
        source,
        uuid: uuid.map(str::to_owned),
    }
}

/// The first bytes of an RGB image in PNG, of this size.
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
fn an_item_is_known_only_with_its_name_and_its_size() {
    let rules = rules();
    let url = data_url(&png(280, 140, 2));
    let here = rules.known(&image(&url, None), &Root::Unsaid).unwrap();
    assert_eq!((here.tokens, here.id.len()), (50, 64));
    assert_eq!(
        rules.known(&image(&url, Some("mine")), &Root::Unsaid),
        Some(known("mine", 50))
    );
    let grey = data_url(&png(280, 140, 0));
    assert_ne!(
        rules.known(&image(&grey, None), &Root::Unsaid).unwrap().id,
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
        Media {
            source: None,
            ..image("", Some("mine"))
        },
        Media {
            modality: Modality::Audio,
            ..image(&url, None)
        },
        Media {
            modality: Modality::Video,
            ..image(&url, Some("mine"))
        },
    ] {
        assert_eq!(rules.known(&unknown, &Root::Unsaid), None, "{unknown:?}");
    }
    let sound = Media {
        modality: Modality::Audio,
        ..image("https://example.com/a.wav", Some("mine"))
    };
    assert_eq!(rules.known(&sound, &Root::Unsaid), Some(known("mine", 3)));
    assert_eq!(
        rules.placeholder(Modality::Image, 2).as_deref(),
        Some("<img 2>")
    );
}

#[test]
fn content_is_named_piece_by_piece_as_it_is_whole() {
    let mut bytes = png(28, 28, 2);
    bytes.resize(300_001, 7);
    let url = data_url(&bytes);
    let base64 = &url[22..];
    let mut pieces = Vec::new();
    content::pieces(base64, |piece| pieces.extend_from_slice(piece)).unwrap();
    assert_eq!(pieces, bytes);
    assert_eq!(content::length(base64), Some(300_001));
    assert_eq!(content::length(base64.trim_end_matches('=')), Some(300_001));
    assert_eq!(content::pieces("AA=A", |_| {}), None);
    assert_eq!(content::length("AAAAA"), None);
}

#[test]
fn rules_that_contradict_the_tokenizer_are_refused() {
    let fixed = |token: &str| {
        rule(&format!(
            r#"{{"token":"{token}","rule":"fixed","tokens":1}}"#
        ))
    };
    let new = |image, audio| {
        let config = MediaConfig {
            image,
            audio,
            ..MediaConfig::default()
        };
        Rules::new(&config, "m", |token| (token == "a").then_some(1)).map(drop)
    };
    assert!(new(fixed("b"), None).unwrap_err().contains("`b`"));
    assert!(
        new(fixed("a"), fixed("a"))
            .unwrap_err()
            .contains("two kinds")
    );
    assert!(new(fixed("a"), None).is_ok());
    assert!(
        new(rule(r#"{"token":"a","rule":"qwen2_vl"}"#), None)
            .unwrap_err()
            .contains("patch_size")
    );
}
