mod cached_conversations;
mod render_options;

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value as Json, json};
use tokenizers::{Encoding, Token, TruncationDirection};

use super::model_files::TemplateSources;
use super::template::ChatTemplates;
use super::truncation::truncate_encoding;
use super::{Config, EncodeError, Encoder, EngineKind, ModelTraits, TokenExactness};
use crate::openai::{self, ApiKind, ChatPrompt, JsonValue, PromptInput, TruncationSide};

fn chat(request: &Json) -> ChatPrompt {
    chat_of(ApiKind::ChatCompletions, &request.to_string())
}

fn chat_of(api: ApiKind, body: &str) -> ChatPrompt {
    match openai::parse(api, body.as_bytes()).unwrap().prompt {
        PromptInput::Chat(chat) => *chat,
        other => panic!("{other:?}"),
    }
}

fn compile(named: &[(&str, &str)]) -> ChatTemplates {
    let named = named
        .iter()
        .map(|(name, source)| ((*name).to_owned(), (*source).to_owned()))
        .collect();
    let tokens = vec![
        ("bos_token", "<s>".to_owned()),
        ("eos_token", "</s>".to_owned()),
    ];
    let now = || {
        jiff::civil::date(2026, 3, 5)
            .at(7, 8, 9, 0)
            .to_zoned(jiff::tz::TimeZone::UTC)
            .unwrap()
    };
    ChatTemplates::compile(
        TemplateSources {
            path: "test".into(),
            named,
        },
        tokens,
        now,
    )
    .unwrap()
}

fn render(template: &str, request: &Json) -> Result<String, EncodeError> {
    compile(&[("default", template)])
        .render(&chat(request))
        .map(|(text, _)| text)
}

fn user() -> Json {
    json!({"messages": [{"role": "user", "content": "hello"}]})
}

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    request: Json,
    expect: String,
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../../../../tests/data/tokens/templates.json")).unwrap();
    let wrong: Vec<_> = cases
        .iter()
        .filter_map(|case| {
            let ours = render(&case.template, &case.request);
            (ours.as_deref() != Ok(&case.expect)).then(|| {
                format!(
                    "{}\n  ours:   {ours:?}\n  theirs: {:?}\n",
                    case.name, case.expect
                )
            })
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cases.len() > 20);
}

#[test]
fn content_format_follows_loops_over_content() {
    let request = json!({"messages": [{"role": "user", "content": "x"}]});
    let shows_parts = |template: &str| {
        let probe = format!("{template}{{{{ messages[0].content is string }}}}");
        render(&probe, &request).unwrap().ends_with("False")
    };
    for template in [
        "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for p in m['content'] | list %}{% endfor %}{% endfor %}",
        "{% set l = messages %}{% set k = l[:1] %}{% for m in k %}{% for p in m.content %}{% endfor %}{% endfor %}",
        "{% for p in content %}{% endfor %}",
        "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
        "{% macro f(a, c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(1, c=m['content']) }}{% endfor %}",
    ] {
        assert!(shows_parts(template), "{template}");
    }
    for template in [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for p in m.other %}{% endfor %}{% endfor %}",
        "{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}",
        "{% macro f(c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m.text) }}{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}",
    ] {
        assert!(!shows_parts(template), "{template}");
    }
}

#[test]
fn tool_template_renders_only_requests_with_tools() {
    let templates = compile(&[("default", "plain"), ("tool_use", "tools"), ("rag", "rag")]);
    let with = json!({"messages": user()["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]});
    assert_eq!(templates.render(&chat(&user())).unwrap().0, "plain");
    assert_eq!(templates.render(&chat(&with)).unwrap().0, "tools");
    let only_tools = compile(&[("tool_use", "tools")]);
    assert_eq!(
        only_tools.render(&chat(&user())),
        Err(EncodeError::NoTemplate)
    );
}

#[test]
fn template_reading_clock_is_clock_dependent() {
    let templates = compile(&[("default", "{{ strftime_now('%Y') }}")]);
    assert_eq!(
        templates.render(&chat(&user())),
        Ok(("2026".to_owned(), TokenExactness::ClockDependent))
    );
}

#[test]
fn template_runtime_is_limited() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    let Err(EncodeError::Render(text)) = render(endless, &user()) else {
        panic!()
    };
    assert!(text.contains("fuel"), "{text}");
}

#[test]
fn template_engine_panic_fails_one_request() {
    let templates = compile(&[("default", "{{ messages[0].content[::-1] }}")]);
    let empty = json!({"messages": [{"role": "user", "content": ""}]});
    assert!(matches!(
        templates.render(&chat(&empty)),
        Err(EncodeError::Render(_))
    ));
    assert_eq!(templates.render(&chat(&user())).unwrap().0, "olleh");
}

#[test]
fn raise_exception_in_template_is_render_error() {
    let Err(EncodeError::Render(text)) = render("{{ raise_exception('no system here') }}", &user())
    else {
        panic!()
    };
    assert!(text.contains("no system here"), "{text}");
}

#[test]
fn character_of_new_unicode_version_is_not_printed() {
    let request = json!({"messages": [{"role": "user", "content": "\u{1fadf}"}]});
    assert_eq!(
        render("{{ messages[0].content }}", &request),
        Ok("\u{1fadf}".to_owned())
    );
    for template in [
        "{{ messages }}",
        "{{ 'x' ~ messages }}",
        "{{ messages | string }}",
        "{{ [messages] | join }}",
    ] {
        assert!(
            matches!(render(template, &request), Err(EncodeError::Uncertain(_))),
            "{template}"
        );
    }
}

#[test]
fn request_variables_override_template_kwargs() {
    let request = json!({"messages": user()["messages"], "chat_template_kwargs": {"add_generation_prompt": false,
        "reasoning_effort": "high", "documents": [1], "bos_token": "B"}, "reasoning_effort": "none"});
    let template = "{{ add_generation_prompt }} {{ reasoning_effort }} {{ enable_thinking }} {{ documents }} {{ bos_token }}";
    assert_eq!(
        render(template, &request),
        Ok("True none False [1] B".to_owned())
    );
}

#[test]
fn rejected_inline_system_messages_are_merged() {
    let body = json!({"system": "a", "messages": [{"role": "user", "content": "b"}, {"role": "system", "content": "c"},
        {"role": "user", "content": "d"}]});
    let chat = chat_of(ApiKind::Messages, &body.to_string());
    let each = "{% for m in messages %}{{ m.role[0] ~ m.content }} {% endfor %}";
    let in_place = "sa ub sc ud ";
    let merged = "sac ub ud ";
    let refusing = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}\
        {% endif %}{% endfor %}";
    for (before, expected) in [
        ("", Ok(in_place)),
        (refusing, Ok(merged)),
        ("{% generation %}{% endgeneration %}", Ok(merged)),
        ("{{ strftime_now('')[:0] }}", Ok(merged)),
        (
            "{% if not tools is defined %}{{ messages[0].content.x.y }}{% endif %}",
            Err(()),
        ),
    ] {
        let rendered = compile(&[("default", &format!("{before}{each}"))]).render(&chat);
        let rendered = rendered.map(|(text, _)| text);
        match expected {
            Ok(expected) => assert_eq!(rendered.as_deref(), Ok(expected), "{before}"),
            Err(()) => assert!(
                matches!(rendered, Err(EncodeError::Uncertain(_))),
                "{before} {rendered:?}"
            ),
        }
    }
}

#[test]
fn generated_call_id_matters_only_if_printed() {
    let body = json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]});
    let chat = chat_of(ApiKind::Messages, &body.to_string());
    let render = |template: &str| {
        compile(&[("default", template)])
            .render(&chat)
            .map(|(text, _)| text)
    };
    assert_eq!(
        render("{{ messages[0].tool_calls[0].function.name }}"),
        Ok("f".to_owned())
    );
    for template in [
        "{{ messages[0].tool_calls[0].id }}",
        "{{ 'x' ~ messages[0].tool_calls[0].id[-9:] }}",
        "{{ messages[0].tool_calls[0] | tojson }}",
    ] {
        assert!(
            matches!(render(template), Err(EncodeError::Uncertain(_))),
            "{template}"
        );
    }
}

#[test]
fn uncommon_numbers_print_as_in_python() {
    let body = r#"{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs":
        {"tools": [{"v": [-0, -0.0, 1e21, 1e-7, 1e400, 18446744073709551616, 2.5]}]}}"#;
    let chat = chat_of(ApiKind::ChatCompletions, body);
    let render = |template: &str| {
        compile(&[("default", &format!("{{% set v = tools[0].v %}}{template}"))]).render(&chat)
    };
    let numbers = "0, -0.0, 1e+21, 1e-07, Infinity, 18446744073709551616, 2.5";
    assert_eq!(
        render("{{ v | tojson }}").unwrap().0,
        format!("[{numbers}]")
    );
    let shown = numbers.replace("Infinity", "inf");
    assert_eq!(render("{{ v }}").unwrap().0, format!("[{shown}]"));
    assert_eq!(
        render("{{ v[0] ~ ' ' ~ v[2] ~ ' ' ~ v[3] ~ ' ' ~ v[4] }}")
            .unwrap()
            .0,
        "0 1e+21 1e-07 inf"
    );
    assert_eq!(
        render("{{ v[2] is number }} {{ v[2] is float }} {{ v[0] is float }}")
            .unwrap()
            .0,
        "True True False"
    );
}

#[test]
fn uncommon_floats_in_template_kwargs_are_uncertain() {
    let template = "{% if v is sequence %}{{ v[0] < 1 }}{% else %}{{ v < 1 }}{% endif %}";
    let render = |engine: EngineKind, kwargs: &str| {
        let mut chat = chat(&user());
        chat.chat_template_kwargs
            .insert("v".to_owned(), JsonValue::parse(kwargs).unwrap());
        compile(&[("default", template)])
            .with_engine(engine, &super::RenderOptions::default())
            .render(&chat)
            .map(|(text, _)| text)
    };
    for engine in [EngineKind::Vllm, EngineKind::Sglang] {
        for kwargs in [
            "1e-7",
            "1e16",
            "1e400",
            "-1e400",
            "NaN",
            "Infinity",
            "[1e-7]",
            r#"[0, {"a": [1e22]}]"#,
        ] {
            let rendered = render(engine, kwargs);
            assert!(
                matches!(rendered, Err(EncodeError::Uncertain(_))),
                "{engine:?} {kwargs} {rendered:?}"
            );
        }
        for (kwargs, expected) in [
            ("0.7", "True"),
            ("[1.5]", "False"),
            ("0.0001", "True"),
            ("-2", "True"),
        ] {
            assert_eq!(
                render(engine, kwargs).as_deref(),
                Ok(expected),
                "{engine:?} {kwargs}"
            );
        }
    }
}

#[test]
fn tools_of_kwargs_replace_tools_of_request() {
    let request = json!({"messages": user()["messages"], "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"tools": [{"b": 1, "a": 2}], "x": "auto"}});
    assert_eq!(
        render("{{ tools | tojson }}{{ x is defined }}", &request),
        Ok("[{\"b\": 1, \"a\": 2}]False".to_owned())
    );
    let null = json!({"messages": user()["messages"], "chat_template_kwargs": {"tools": null}});
    assert_eq!(render("{{ tools }}", &null), Ok("None".to_owned()));
}

#[test]
fn template_reading_thinking_field_is_uncertain() {
    let request =
        json!({"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]});
    assert_eq!(
        render("{{ messages[0].reasoning }}", &request),
        Ok("y".to_owned())
    );
    assert!(matches!(
        render("{{ messages[0].thinking }}", &request),
        Err(EncodeError::Uncertain(_))
    ));
    assert_eq!(
        render("{{ messages[0].thinking }}", &user()),
        Ok(String::new())
    );
}

#[test]
fn truncated_encoding_equals_tokenizer_truncation() {
    for length in 0..6usize {
        let tokens = (0..length).map(|at| Token::new(at as u32 + 7, at.to_string(), (at, at + 1)));
        let whole = Encoding::from_tokens(tokens.collect(), 0);
        for keep in 0..8 {
            for (side, direction) in [
                (TruncationSide::Left, TruncationDirection::Left),
                (TruncationSide::Right, TruncationDirection::Right),
            ] {
                let mut expected = whole.clone();
                expected.truncate(keep, 0, direction);
                expected.take_overflowing();
                assert_eq!(
                    truncate_encoding(whole.clone(), keep, side),
                    expected,
                    "{keep} of {length} from {side:?}"
                );
            }
        }
    }
}

#[test]
fn models_with_equal_tokenizers_share_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = Config {
        tokenizer: root.join("examples/models/qwen2.5/tokenizer.json.gz"),
        tokenizer_config: None,
        chat_template: None,
    };
    let traits = |name: &str, class: Option<&str>| ModelTraits {
        name: name.to_owned(),
        tokenizer_class: class.map(str::to_owned),
        ..ModelTraits::default()
    };
    let first = Encoder::load_with_traits(&files, &traits("first", None)).unwrap();
    assert!(!first.tokenizer.has_fast_path());
    let second = Encoder::load_with_fast_path(&files, &traits("second", None)).unwrap();
    assert!(Arc::ptr_eq(&first.tokenizer, &second.tokenizer));
    assert!(first.tokenizer.has_fast_path());
    let other = traits("other", Some("TokenizersBackend"));
    let other = Encoder::load_with_traits(&files, &other).unwrap();
    assert!(!Arc::ptr_eq(&first.tokenizer, &other.tokenizer));
}
