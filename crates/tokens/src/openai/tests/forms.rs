use proptest::prelude::*;

use super::super::multipart::{multipart_boundary, multipart_model};

#[test]
fn boundary_is_read_from_content_type() {
    for (content_type, expected) in [
        ("multipart/form-data; boundary=abc", Some("abc")),
        (
            "Multipart/Form-Data;charset=utf-8; Boundary=\"a;b=c\"",
            Some("a;b=c"),
        ),
        (
            "multipart/form-data; boundary=\"a\\\"b\"; x=y",
            Some("a\"b"),
        ),
        ("multipart/form-data; x; boundary=abc ", Some("abc")),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/mixed; boundary=abc", None),
        ("application/json; boundary=abc", None),
    ] {
        assert_eq!(
            multipart_boundary(content_type).as_deref(),
            expected,
            "{content_type}"
        );
    }
    assert_eq!(
        multipart_boundary(&format!("multipart/form-data; boundary={}", "x".repeat(71))),
        None
    );
}

fn part(head: &str, content: &str) -> String {
    format!("--B\r\n{head}\r\n\r\n{content}\r\n")
}

#[test]
fn model_field_is_found_among_parts() {
    let named = |name: &str| format!("Content-Disposition: form-data; name=\"{name}\"");
    let file = part(
        "content-disposition: form-data; name=\"file\"; filename=\"model\"\r\nContent-Type: audio/wav",
        "\0--B",
    );
    let model_part = part(&named("model"), "whisper");
    let cases = [
        (format!("{model_part}--B--\r\n"), Some("whisper")),
        (format!("{file}{model_part}--B--\r\n"), Some("whisper")),
        (format!("preamble\r\n{model_part}--B--"), Some("whisper")),
        (
            format!("{}{model_part}--B--", part(&named("prompt"), "")),
            Some("whisper"),
        ),
        (
            format!("--B \t\r\n{}", &model_part[5..]) + "--B--",
            Some("whisper"),
        ),
        (
            part("CONTENT-DISPOSITION: form-data; name=model", "m") + "--B--",
            Some("m"),
        ),
        (part(&named("model"), "") + "--B--", Some("")),
        // A file with the name `model` is not the field.
        (
            part(
                "Content-Disposition: form-data; name=\"model\"; filename=\"x\"",
                "m",
            ) + "--B--",
            None,
        ),
        (format!("{file}--B--{model_part}"), None),
        (format!("{file}--BX{model_part}"), None),
        (part(&named("model"), &"m".repeat(2000)) + "--B--", None),
        (
            part(
                &format!("x: {}\r\n{}", "y".repeat(5000), named("model")),
                "m",
            ) + "--B--",
            None,
        ),
        (
            part(&named("prompt"), "x").repeat(5000) + &model_part + "--B--",
            None,
        ),
        (String::new(), None),
        ("--B".to_owned(), None),
        ("--B\r\n\r\n".to_owned(), None),
    ];
    for (body, expected) in cases {
        assert_eq!(
            multipart_model("B", body.as_bytes()).as_deref(),
            expected,
            "{}",
            &body[..body.len().min(200)]
        );
    }
}

#[test]
fn truncated_form_keeps_complete_model() {
    let whole = part("Content-Disposition: form-data; name=\"model\"", "whisper")
        + &part("x: y", &"z".repeat(1000));
    let known = whole.find("whisper").unwrap() + "whisper\r\n--B".len();
    for cut in 0..whole.len() {
        let found = multipart_model("B", &whole.as_bytes()[..cut]);
        assert_eq!(
            found.as_deref(),
            (cut >= known).then_some("whisper"),
            "{cut}"
        );
    }
}

proptest! {
    #[test]
    fn parsing_any_form_never_panics(body in "(--B|\r\n|\r|-|model|name=|content-disposition:|;|\"|\\\\| |x){0,40}") {
        let _ignored = (multipart_model("B", body.as_bytes()), multipart_boundary(&format!("multipart/form-data;{body}")));
    }
}
