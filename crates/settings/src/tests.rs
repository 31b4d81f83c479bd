use std::path::Path;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::*;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetSettings {
    name: String,
    ranks: Option<std::num::NonZeroU32>,
    #[serde(default)]
    drain: bool,
    #[serde(default)]
    poll: PollSettings,
    #[serde(default)]
    workers: Vec<WorkerEntry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bind: Option<std::net::SocketAddr>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PollSettings {
    delay: DurationSetting,
    size: ByteSize,
}

impl Default for PollSettings {
    fn default() -> Self {
        Self {
            delay: DurationSetting::seconds(1),
            size: ByteSize::kib(1),
        }
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerEntry {
    id: u64,
    engine: EngineName,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EngineName {
    Vllm,
    Sglang,
}

fn read(text: &str) -> Result<FleetSettings, Vec<String>> {
    SettingsDocument::parse(Path::new("s"), text.as_bytes())
        .and_then(|document| document.read())
        .map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

#[test]
fn valid_text_is_read_completely() {
    let settings =
        read("name: a\ndrain: true\npoll:\nworkers: [{id: 18446744073709551615, engine: vllm}]\n")
            .unwrap();
    assert_eq!(
        settings.workers,
        [WorkerEntry {
            id: u64::MAX,
            engine: EngineName::Vllm
        }]
    );
    assert_eq!(
        settings.poll,
        PollSettings::default(),
        "an empty section has the default values"
    );
}

#[test]
fn every_deserialization_error_has_a_position() {
    let text = "\
name: 7
ranks: 0
drian: true
poll: {delay: 5, size: 3 kilobytes, engine: vllm}
workers:
  - {id: 1, engin: vllm}
  - {id: -1, engine: sglan}
  - {id: 2}
  - 5
";
    let expected = [
        "s:1:7: `name` must be text, not 7; put it in quotes",
        "s:2:8: `ranks` must be a whole number from 1, not 0",
        "s:3:1: unknown key `drian`; did you mean `drain`?",
        "s:4:15: `delay` must be a length of time with its unit, for example 250ms or 30s, not 5",
        "s:4:24: `size`: `3 kilobytes` is not a size; write for example 512B, 16KiB or 32MiB",
        "s:4:37: unknown key `engine` in `poll`; known keys: delay, size",
        "s:6:13: unknown key `engin`; did you mean `engine`?",
        "s:7:10: `id` must be a whole number from 0 to 18446744073709551615, not -1",
        "s:7:22: `engine` must be one of vllm, sglang, not `sglan`; did you mean `sglang`?",
        "s:8:5: the required key `engine` is missing in `workers[2]`",
        "s:9:5: `workers[3]` must be a map of keys, not 5",
    ];
    assert_eq!(read(text).unwrap_err(), expected);
}

#[test]
fn invalid_yaml_has_a_position() {
    for (text, start) in [
        ("name: [a\n", "s:"),
        ("name: a\n  b: c\n", "s:2:"),
        ("name: a\nname: b\n", "s:2:1: this is not valid YAML: "),
        ("a: *undefined\n", "s:1:"),
        ("name: a\n---\nname: b\n", "s:3:"),
    ] {
        let errors = read(text).unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].starts_with(start),
            "{text:?}: {errors:?}"
        );
        assert!(!errors[0].contains('\n'), "one line each: {errors:?}");
    }
    let errors = SettingsDocument::parse(Path::new("s"), b"name: a\ndrain: \xff\n")
        .map(drop)
        .unwrap_err();
    assert_eq!(
        errors[0].to_string(),
        "s:2: this is not UTF-8 text; save the file as UTF-8"
    );
}

#[test]
fn hostile_text_is_rejected_quickly() {
    let nested = |depth| "[".repeat(depth) + &"]".repeat(depth);
    for text in [
        nested(65),
        nested(1_900),
        nested(100_000),
        format!("name: {}", nested(10_000)),
    ] {
        assert_eq!(read(&text).unwrap_err().len(), 1);
    }
    let wrong: String = (0..5_000).map(|n| format!("key{n}: {n}\n")).collect();
    assert_eq!(read(&wrong).unwrap_err().len(), 100);
}

#[test]
fn problem_has_the_line_of_the_nearest_value() {
    let document = SettingsDocument::parse(
        Path::new("s"),
        b"name: a\nworkers:\n  - id: 1\n    engine: vllm\n",
    )
    .unwrap();
    let line_of = |steps: &[PathStep]| document.tree().position_of(steps).line;
    assert_eq!(line_of(&["name".into()]), 1);
    assert_eq!(line_of(&["workers".into(), 0.into(), "engine".into()]), 4);
    assert_eq!(line_of(&["workers".into(), 0.into(), "port".into()]), 3);
    assert_eq!(line_of(&["workers".into(), 9.into()]), 3);
    let problems = vec![Problem::of("workers", "late"), Problem::of("name", "early")];
    let located: Vec<_> = document
        .locate(problems)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(located, ["s:1:7: early", "s:3:3: late"]);
}

#[test]
fn durations_and_sizes_print_as_parsed() {
    for text in ["250ms", "30s", "5m", "2h", "0s", "90s", "1500us"] {
        assert_eq!(text.parse::<DurationSetting>().unwrap().to_string(), text);
    }
    for text in ["32MiB", "16KiB", "1GiB", "5MB", "123B", "0B"] {
        assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
    }
    assert_eq!("1024KiB".parse::<ByteSize>().unwrap(), ByteSize::mib(1));
    let error = "32".parse::<ByteSize>().unwrap_err();
    assert!(error.starts_with("32 has no unit; write 32B"), "{error}");
    assert!("30".parse::<DurationSetting>().is_err() && "".parse::<DurationSetting>().is_err());
    assert!("".parse::<ByteSize>().is_err() && "-1".parse::<ByteSize>().is_err());
}

#[test]
fn only_similar_words_are_suggested() {
    assert_eq!(nearest("endpont", ["endpoint", "model"]), Some("endpoint"));
    assert_eq!(nearest("tpc", ["unix", "tcp"]), Some("tcp"));
    assert_eq!(nearest("colour", ["endpoint", "model"]), None);
    assert_eq!(nearest("vLLM", ["vllm", "sglang"]), Some("vllm"));
}

#[test]
fn frequent_mistakes_have_specific_fixes() {
    let cases = [
        (
            "name: a\npoll:\n\tpause: 1s\n",
            "s:3:1: the line begins with a tab; YAML is indented with spaces only",
        ),
        (
            "name: a\nranks: \"16\"\n",
            "s:2:8: `ranks` must be a whole number from 1, not `16`; remove the quotes",
        ),
        (
            "name: a\ndrain: 'true'\n",
            "s:2:8: `drain` must be true or false, not `true`; remove the quotes",
        ),
        (
            "name: a\nworkers: null\n",
            "s:2:10: `workers` has no value; it must be a list",
        ),
        (
            "name: a\npoll: {size: 32}\n",
            "s:2:14: `size`: 32 has no unit; write 32B for bytes, or for example 32KiB or 32MiB",
        ),
        (
            "apiVersion: v1\nname: a\n",
            "s:1:1: this is a Kubernetes manifest, not a settings file; pass the text inside its `data`",
        ),
        (
            "name: a\nranks: 99999999999999999999999\n",
            "s:2:8: `ranks` must be a whole number from 1, not 99999999999999999999999",
        ),
        (
            "name: a\nbind: 9002\n",
            "s:2:7: `bind` must be an address and a port, not 9002; write 127.0.0.1:9002, or 0.0.0.0:9002 for all addresses",
        ),
        (
            "name: a\nbind: '9002'\n",
            "s:2:7: `bind`: `9002` has no address; write 127.0.0.1:9002, or 0.0.0.0:9002 for all addresses",
        ),
        (
            "name: a\nbind: localhost:80\n",
            "s:2:7: `bind`: `localhost:80` has a host name instead of an IP address; write 127.0.0.1:80",
        ),
        (
            "name: a\nbind: vllm-0.vllm:80\n",
            "s:2:7: `bind`: `vllm-0.vllm:80` has a host name instead of an IP address",
        ),
        (
            "name: a\nbind: http://10.0.0.1:80\n",
            "s:2:7: `bind`: `http://10.0.0.1:80` is not an IP:PORT; remove `http://` and write 10.0.0.1:80",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(read(text).unwrap_err(), [expected], "{text}");
    }
    let empty = read("# only a comment\n").unwrap_err();
    assert!(empty[0].starts_with("s: the file is empty"), "{empty:?}");
}

#[test]
fn known_keys_are_listed_once() {
    let errors = read("name: a\nfirst: 1\nsecond: 2\n").unwrap_err();
    assert_eq!(
        errors,
        [
            "s:2:1: unknown key `first` in the file; known keys: name, ranks, drain, poll, workers, bind",
            "s:3:1: unknown key `second` in the file",
        ]
    );
}

#[test]
fn extension_keys_of_the_root_are_ignored() {
    let settings = read("x-delay: &delay {delay: 5s}\nname: a\npoll: *delay\n").unwrap();
    assert_eq!(settings.poll.delay, DurationSetting::seconds(5));
    assert!(read("name: a\npoll: {x-delay: 1}\n").is_err());
}

/// Reads a text with some variables in the environment.
fn read_with_variables(text: &str) -> Result<FleetSettings, Vec<String>> {
    let variable = |name: &str| {
        let value = match name {
            "NAME" => "a",
            "NUMBER" => "16",
            "NEGATIVE" => "-5",
            "YES" => "true",
            "ENGINE" => "vllm",
            "PORT" => "9002",
            "TIME" => "250ms",
            "EMPTY" => "",
            "SECRET" => "hunter2",
            _ => return None,
        };
        Some(value.to_owned())
    };
    SettingsDocument::parse_with(Path::new("s"), text.as_bytes(), &variable)
        .and_then(|document| document.read())
        .map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

#[test]
fn variables_have_the_type_of_their_key() {
    let settings = read_with_variables(
        "name: ${NUMBER}\nranks: ${NUMBER}\ndrain: \"${YES}\"\npoll: {delay: '${TIME}', size: '${NUMBER}KiB'}\n\
         workers: [{id: '${ABSENT:-7}', engine: '${ENGINE}'}]\nbind: 127.0.0.1:${PORT}\n",
    )
    .unwrap();
    assert_eq!(settings.name, "16");
    assert_eq!(settings.ranks.map(std::num::NonZeroU32::get), Some(16));
    assert!(settings.drain);
    assert_eq!(settings.poll.delay, DurationSetting::millis(250));
    assert_eq!(settings.poll.size, ByteSize::kib(16));
    let engine = EngineName::Vllm;
    assert_eq!(settings.workers, [WorkerEntry { id: 7, engine }]);
    assert_eq!(settings.bind, Some("127.0.0.1:9002".parse().unwrap()));
}

#[test]
fn empty_variable_leaves_an_optional_key_unset() {
    let settings =
        read_with_variables("name: ${EMPTY}\nranks: ${EMPTY}\nbind: ${ABSENT:-}\n").unwrap();
    assert_eq!(
        (settings.name.as_str(), settings.ranks, settings.bind),
        ("", None, None)
    );
}

#[test]
fn errors_name_variables_instead_of_values() {
    let text = "\
name: a
ranks: ${NEGATIVE}
drain: ${SECRET}
poll: {delay: '${SECRET}', size: '${SECRET}', engine: '${SECRET}'}
workers: [{id: '${SECRET}', engine: '${SECRET}'}, '${SECRET}']
bind: http://${SECRET}
";
    let expected = [
        "s:2:8: `ranks` must be a whole number from 1, not `${NEGATIVE}`; the value comes from the environment",
        "s:3:8: `drain` must be true or false, not `${SECRET}`; the value comes from the environment",
        "s:4:15: `delay`: `${SECRET}` is not a length of time; write for example 250ms, 30s or 5m; \
         the value comes from the environment",
        "s:4:34: `size`: `${SECRET}` is not a size; write for example 512B, 16KiB or 32MiB; \
         the value comes from the environment",
        "s:4:47: unknown key `engine` in `poll`; known keys: delay, size",
    ];
    let errors = read_with_variables(text).unwrap_err();
    assert_eq!(errors[..5], expected);
    assert_eq!(errors.len(), 9, "{errors:?}");
    assert!(
        errors.iter().all(|error| !error.contains("hunter2")),
        "{errors:?}"
    );
}

#[test]
fn problems_name_variables_instead_of_values() {
    let variable = |name: &str| match name {
        "SECRET" => Some("hunter2".to_owned()),
        _ => Some("3".to_owned()),
    };
    let text = "name: ${SECRET}\nranks: ${RANKS}\n";
    let document =
        SettingsDocument::parse_with(Path::new("s"), text.as_bytes(), &variable).unwrap();
    let problem = |text: &str| {
        let errors = document.locate(vec![Problem::of("name", text)]);
        errors[0].problem.clone()
    };
    assert_eq!(
        problem("`/etc/hunter2/3` is bad"),
        "`/etc/${SECRET}/3` is bad"
    );
    assert_eq!(problem("hunter22 or ahunter2"), "hunter22 or ahunter2");
}

#[test]
fn unset_variable_is_reported_with_other_errors() {
    let errors = read_with_variables(
        "name: 7\nranks: ${ABSENT}\npoll: {delay: '${A-B}', engine: vllm}\nworkers: [{id: 1, engine: '${ABSENT}'}]\n",
    )
    .unwrap_err();
    let starts = [
        "s:1:7: `name` must be text",
        "s:2:8: the environment variable ABSENT is not set",
        "s:3:15: `A-B` is not the name",
        "s:3:25: unknown key `engine`",
        "s:4:27: the environment variable ABSENT is not set",
    ];
    assert_eq!(errors.len(), starts.len(), "{errors:?}");
    for (error, start) in errors.iter().zip(starts) {
        assert!(error.starts_with(start), "{start}: {errors:?}");
    }
}

#[test]
fn unset_variable_of_an_anchor_is_reported_once() {
    let text = "x-unused: ${ABSENT}\nx-poll: &poll {delay: '${ABSENT}'}\nx-name: &name ${ABSENT}\n\
                name: *name\npoll: *poll\nworkers: [*poll, *poll]\n";
    let errors = read_with_variables(text).unwrap_err();
    let unset: Vec<_> = errors
        .iter()
        .filter(|error| error.contains("ABSENT"))
        .collect();
    assert_eq!(unset.len(), 2, "{errors:?}");
    assert!(
        unset[0].starts_with("s:2:23:") && unset[1].starts_with("s:3:"),
        "{errors:?}"
    );
}

#[test]
fn quotes_are_suggested_only_if_they_help() {
    let cases = [
        (
            "name: a\nranks: '-5'\n",
            "s:2:8: `ranks` must be a whole number from 1, not `-5`",
        ),
        (
            "name: a\nranks: '0'\n",
            "s:2:8: `ranks` must be a whole number from 1, not `0`",
        ),
        ("name: [a]\n", "s:1:7: `name` must be text, not a list"),
        (
            "name: {a: b}\n",
            "s:1:7: `name` must be text, not a map of keys",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(read(text).unwrap_err(), [expected], "{text}");
    }
}

#[test]
fn tab_does_not_hide_another_error() {
    let errors = read("name: a\ndrain: [true\n\t# comment\npoll: 5\n").unwrap_err();
    assert!(!errors[0].contains("tab"), "{errors:?}");
    let errors = read("name: a\n\t# comment\nname: b\n").unwrap_err();
    assert!(errors[0].contains("duplicate"), "{errors:?}");
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(document) = SettingsDocument::parse(Path::new("s"), &bytes) {
            let _ = document.read::<FleetSettings>();
        }
    }

    #[test]
    fn broken_yaml_is_parsed_without_panic(text in "[a-e:\\-\\[\\]{}&*!|>'\"%@#, \n?~0-9.]{0,80}") {
        if let Ok(document) = SettingsDocument::parse(Path::new("s"), text.as_bytes()) {
            let _ = document.read::<FleetSettings>();
        }
    }

    #[test]
    fn units_round_trip(nanos in any::<u64>(), bytes in any::<u64>()) {
        let period = DurationSetting(std::time::Duration::from_nanos(nanos));
        prop_assert_eq!(period.to_string().parse::<DurationSetting>().unwrap(), period);
        prop_assert_eq!(ByteSize(bytes).to_string().parse::<ByteSize>().unwrap(), ByteSize(bytes));
    }
}

#[test]
fn elapsed_time_has_at_most_two_units() {
    let cases = [
        (0, "0ms"),
        (87, "87ms"),
        (1_240, "1.2s"),
        (59_900, "59.9s"),
        (200_000, "3m20s"),
        (7_325_000, "2h2m"),
        (187_200_000, "2d4h"),
    ];
    for (millis, text) in cases {
        assert_eq!(
            format_elapsed(std::time::Duration::from_millis(millis)),
            text
        );
    }
}
