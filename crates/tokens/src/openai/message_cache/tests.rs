use proptest::prelude::*;
use warmroute_metrics::Metrics;
use warmroute_property_tests::property_config;

use super::*;
use crate::openai::{
    ApiKind, ApiRequest, ParseError, PromptInput, parse, parse_body_cached, plain_messages,
};

const API: ApiKind = ApiKind::ChatCompletions;

fn message_cache(limit: usize) -> MessageCache {
    MessageCache::new(PromptCache::new(limit, Arc::new(Metrics::new())))
}

fn parse_with(cache: &MessageCache, body: &[u8]) -> Result<ApiRequest, ParseError> {
    let body = Bytes::copy_from_slice(body);
    parse_body_cached(API, None, &body, cache, None).map(|(request, _)| request)
}

/// Parses a valid body, and returns the number of its messages that were cached.
fn count_cached(cache: &MessageCache, body: &str, tenant: Option<&str>) -> usize {
    let bytes = Bytes::copy_from_slice(body.as_bytes());
    let (request, reuse) = parse_body_cached(API, None, &bytes, cache, tenant).unwrap();
    assert_eq!(request, parse(API, body.as_bytes()).unwrap());
    reuse.found.map_or(0, |prefix| prefix.message_count)
}

fn text_message(role: &str, length: usize) -> String {
    let text = "a \\\"quoted\\\" line\\n".repeat(length / 16);
    format!(r#"{{"role":"{role}","content":"{text}"}}"#)
}

fn body_of(messages: &[String]) -> String {
    format!(
        r#"{{"model":"m","messages":[{}],"stream":true}}"#,
        messages.join(", ")
    )
}

fn messages_of(request: &ApiRequest) -> &[Arc<ChatMessage>] {
    match &request.prompt {
        PromptInput::Chat(chat) => &chat.messages,
        other => panic!("{other:?}"),
    }
}

fn conversation() -> Vec<String> {
    let turn = |at: usize| text_message(["user", "assistant"][at % 2], 700 + 900 * at);
    (0..12).map(turn).collect()
}

#[test]
fn next_turn_reuses_parsed_messages() {
    let cache = message_cache(64 << 20);
    let mut messages = conversation();
    assert_eq!(count_cached(&cache, &body_of(&messages), None), 0);
    messages.push(text_message("user", 100));
    // The last chunk of the first turn was not complete.
    assert_eq!(count_cached(&cache, &body_of(&messages), None), 11);
    messages[5] = messages[5].replacen("line", "edited", 1);
    let cached = count_cached(&cache, &body_of(&messages), None);
    assert!((1..=5).contains(&cached));
}

#[test]
fn messages_with_tool_calls_are_reused() {
    let cache = message_cache(64 << 20);
    let call = r#"{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]}"#;
    let part = r#"{"role":"user","content":[{"type":"text","text":"x"}]}"#;
    let mut messages = vec![call.to_owned(), part.to_owned()];
    messages.extend(conversation());
    let cached = [(); 2].map(|()| count_cached(&cache, &body_of(&messages), None));
    assert_eq!(cached, [0, 13]);
}

#[test]
fn tenants_share_no_messages() {
    let cache = message_cache(64 << 20);
    let body = body_of(&conversation());
    let cached = ["a", "b", "a"].map(|tenant| count_cached(&cache, &body, Some(tenant)));
    assert_eq!(cached, [0, 0, 11]);
}

#[test]
fn bodies_with_salt_are_not_cached() {
    let cache = message_cache(64 << 20);
    let body = body_of(&conversation()).replace("\"stream\":true", "\"cache_salt\":\"s\"");
    let cached = [(); 2].map(|()| count_cached(&cache, &body, None));
    assert_eq!(cached, [0, 0]);
    assert_eq!(cache.prompt_cache.bytes(), 0);
}

#[test]
fn text_may_contain_name_of_salt() {
    let cache = message_cache(64 << 20);
    let mut messages = conversation();
    messages[0] = messages[0].replacen("line", r#"\"cache_salt\""#, 1);
    let body = body_of(&messages);
    let cached = [(); 2].map(|()| count_cached(&cache, &body, None));
    assert_eq!(cached, [0, 11]);
}

#[test]
fn cached_texts_take_little_memory() {
    let cache = message_cache(64 << 20);
    let tool = r#"{"role":"tool","tool_call_id":"call_1","content":"x"}"#;
    let mut messages = conversation();
    messages.extend(vec![tool.replace('x', &"word ".repeat(2_000)); 10]);
    let body = body_of(&messages);
    count_cached(&cache, &body, None);
    let bytes = cache.prompt_cache.bytes();
    assert!(bytes * 8 < body.len(), "{bytes} of {}", body.len());
}

#[test]
fn bodies_with_escaped_salt_store_no_messages() {
    for salt in [
        r#""cache\u005fsalt":"s""#,
        r#""nvext":{"cache\u005fsalt":"s"}"#,
    ] {
        let cache = message_cache(64 << 20);
        let body = body_of(&conversation()).replace("\"stream\":true", salt);
        parse_with(&cache, body.as_bytes()).unwrap();
        assert_eq!(cache.prompt_cache.bytes(), 0, "{salt}");
    }
}

#[test]
fn white_space_at_chunk_end_loses_no_message() {
    let message = |length: usize| {
        let frame = r#"{"role":"user","content":""}"#.len();
        format!(
            r#"{{"role":"user","content":"{}"}}"#,
            "x".repeat(length - frame)
        )
    };
    // The first message ends one byte before the end of the first chunk.
    let first = message(CHUNK_BYTES - 2);
    let [second, third] = [message(CHUNK_BYTES), message(2 * CHUNK_BYTES)];
    let body =
        |space: &str, next: &str| format!(r#"{{"messages":[{first}{space},{next}],"seed":1}}"#);
    let bodies = [body("  ", &second), body(" ", &third)];
    for order in [[0, 1], [1, 0]] {
        let cache = message_cache(64 << 20);
        // Both bodies are read before one of them is stored.
        let read =
            order.map(|at| plain_messages::read_cached(&bodies[at].clone().into(), &cache, None));
        for (messages, rest) in read.iter().flatten() {
            cache.store(messages, rest);
        }
        for body in &bodies {
            let request = parse_with(&cache, body.as_bytes()).unwrap();
            assert_eq!(request, parse(API, body.as_bytes()).unwrap());
        }
    }
}

#[test]
fn value_limit_equals_that_of_parsing() {
    for values in [131_066, 131_067, 131_068, 131_069] {
        let tools = vec!["1"; values].join(",");
        let body =
            format!(r#"{{"messages":[{{"role":"user","content":"hi"}}],"tools":[{tools}]}}"#);
        let cache = message_cache(64 << 20);
        let ours = parse_with(&cache, body.as_bytes()).unwrap();
        assert_eq!(ours, parse(API, body.as_bytes()).unwrap(), "{values}");
    }
}

#[test]
fn media_are_not_cached() {
    let cache = message_cache(64 << 20);
    let image = format!(
        r#"{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}}]}}"#,
        "A".repeat(100_000)
    );
    parse_with(&cache, body_of(&[image]).as_bytes()).unwrap();
    assert_eq!(cache.prompt_cache.bytes(), 0);
}

#[test]
fn cached_messages_stay_within_limit() {
    let limit = 1 << 20;
    let cache = message_cache(limit);
    for at in 0..100 {
        let mut messages = vec![text_message("system", 40 * at)];
        messages.extend(conversation());
        parse_with(&cache, body_of(&messages).as_bytes()).unwrap();
        assert!(cache.prompt_cache.bytes() <= limit);
    }
    assert!(cache.prompt_cache.bytes() > limit / 2);
}

#[test]
fn many_short_messages_are_read() {
    let cache = message_cache(64 << 20);
    let messages = vec![text_message("user", 16); 20_000];
    let body = body_of(&messages);
    for _ in 0..2 {
        let request = parse_with(&cache, body.as_bytes()).unwrap();
        assert_eq!(messages_of(&request).len(), messages.len());
    }
}

/// Messages of all forms, some of them longer than a chunk and some invalid.
fn message() -> impl Strategy<Value = String> {
    let text = prop_oneof![
        Just("plain "),
        Just("\\n"),
        Just("\\u00e9"),
        Just("漢"),
        Just("\\\"")
    ];
    prop_oneof![
        20 => (text, 0..3000_usize).prop_map(|(text, count)| {
            format!(r#"{{"role":"user","content":"{}"}}"#, text.repeat(count))
        }),
        3 => Just(r#"{"role":"assistant","tool_calls":[{"a":[1,{"b":"]"}]}]}"#.to_owned()),
        3 => Just(r#" { "content" : "x" , "role" : "user" } "#.to_owned()),
        1 => Just(r#"{"role":"user","content":"\x"}"#.to_owned()),
        1 => Just(r#"{"role":1}"#.to_owned()),
    ]
}

/// A body that begins like the previous one, up to a number of messages, or an edited body.
#[derive(Clone, Debug)]
struct GeneratedTurn {
    retained: prop::sample::Index,
    added: Vec<String>,
    separator: &'static str,
    edit: Option<(prop::sample::Index, u8)>,
}

fn turn() -> impl Strategy<Value = GeneratedTurn> {
    let separators = proptest::sample::select(&[",", " , ", ",  "][..]);
    let edit = proptest::option::weighted(0.2, (any::<prop::sample::Index>(), any::<u8>()));
    let added = proptest::collection::vec(message(), 0..4);
    (any::<prop::sample::Index>(), added, separators, edit).prop_map(
        |(retained, added, separator, edit)| GeneratedTurn {
            retained,
            added,
            separator,
            edit,
        },
    )
}

proptest! {
    #![proptest_config(property_config(2_000))]

    #[test]
    fn cached_parsing_equals_full_parsing(
        turns in proptest::collection::vec(turn(), 1..8),
        limit in proptest::sample::select(&[20_000, 60_000, 4 << 20][..]),
    ) {
        let cache = message_cache(limit);
        let mut messages: Vec<String> = Vec::new();
        for turn in turns {
            messages.truncate(turn.retained.index(messages.len() + 1).max(messages.len() / 2));
            messages.extend(turn.added);
            let list = messages.join(turn.separator);
            let mut body = format!(r#"{{"messages":[{list}],"max_tokens":5}}"#).into_bytes();
            if let Some((index, byte)) = turn.edit {
                let at = index.index(body.len());
                body[at] = byte;
            }
            match (parse_with(&cache, &body), parse(API, &body)) {
                (Ok(ours), Ok(theirs)) => prop_assert_eq!(ours, theirs),
                (ours, theirs) => prop_assert_eq!(
                    ours.map_err(|error| error.to_string()),
                    theirs.map_err(|error| error.to_string())
                ),
            }
        }
    }
}
