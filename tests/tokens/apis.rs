//! Requests to four APIs and the tokens that vLLM 0.32 made of them (`tests/data/tokens/apis-qwen2_5.json.gz`). The outcome of
//! every case is asserted, so that a regression shows.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;
use warmroute::openai::{self, Api};
use warmroute::prompt::Exactness;

use super::QWEN;
use super::further::contents;

/// Length of the model that made the captures (`--max-model-len`).
const MAX_MODEL_LEN: u64 = 16384;

#[derive(Deserialize)]
struct Case {
    case: String,
    path: String,
    request: Box<RawValue>,
    status: u16,
    token_ids: Box<RawValue>,
    /// Salt that the engine put on the prompt.
    #[serde(default)]
    render_cache_salt: Option<String>,
}

/// Outcomes of the cases of one API.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcomes {
    /// Our tokens are the engine's.
    equal: usize,
    /// They are not.
    different: usize,
    /// The engine answers, and we do not tokenize the request.
    declined: usize,
    /// The engine refuses the request.
    refused: usize,
}

enum Outcome {
    Equal,
    Different,
    Declined(String),
    Refused,
}

/// The exact outcomes.
const TABLE: [(&str, Outcomes); 4] = [
    (
        "/inference/v1/generate",
        Outcomes {
            equal: 19,
            different: 0,
            declined: 0,
            refused: 11,
        },
    ),
    (
        "/v1/chat/completions",
        Outcomes {
            equal: 39,
            different: 0,
            declined: 1,
            refused: 10,
        },
    ),
    (
        "/v1/messages",
        Outcomes {
            equal: 64,
            different: 0,
            declined: 1,
            refused: 7,
        },
    ),
    (
        "/v1/responses",
        Outcomes {
            equal: 76,
            different: 0,
            declined: 2,
            refused: 14,
        },
    ),
];

/// The declined cases, and why they are declined.
const DECLINED: [(&str, &str); 4] = [
    (
        "chat transfer params with tokens",
        "another engine forwards the prompt's tokens",
    ),
    (
        "messages result in assistant with blocks",
        "only the engine knows its tokens",
    ),
    ("responses conversation", "only the engine knows its tokens"),
    (
        "responses previous input messages",
        "only the engine knows its tokens",
    ),
];

fn cases() -> Vec<Case> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/apis-qwen2_5.json.gz");
    serde_json::from_slice(&contents(&data)).unwrap()
}

fn outcome(case: &Case) -> Outcome {
    let api = Api::of_path(&case.path).unwrap();
    let read = openai::parse(api, case.request.get().as_bytes());
    if case.status != 200 {
        return Outcome::Refused;
    }
    let engine: Vec<u32> = serde_json::from_str(case.token_ids.get()).unwrap();
    let mut request = match read {
        Ok(request) => request,
        Err(error) => return Outcome::Declined(error.to_string()),
    };
    request.measure(MAX_MODEL_LEN);
    match QWEN.encode(&request) {
        Ok(encoded) if encoded.exact == Exactness::Exact && encoded.prompts == [engine] => {
            Outcome::Equal
        }
        Ok(_) => Outcome::Different,
        Err(error) => Outcome::Declined(error.to_string()),
    }
}

#[test]
fn captured_api_requests_match_outcome_table() {
    let cases = cases();
    assert_eq!(cases.len(), 244);
    let (mut table, mut declined, mut different) =
        (BTreeMap::<&str, Outcomes>::new(), Vec::new(), Vec::new());
    for case in &cases {
        let outcomes = table.entry(&case.path).or_default();
        match outcome(case) {
            Outcome::Equal => outcomes.equal += 1,
            Outcome::Different => {
                outcomes.different += 1;
                different.push(&case.case);
            }
            Outcome::Declined(why) => {
                outcomes.declined += 1;
                declined.push((case.case.as_str(), why));
            }
            Outcome::Refused => outcomes.refused += 1,
        }
    }
    assert!(different.is_empty(), "{different:#?}");
    declined.sort();
    let expected = declined
        .iter()
        .zip(DECLINED)
        .all(|(found, known)| found.0 == known.0 && found.1.contains(known.1));
    assert!(
        expected && declined.len() == DECLINED.len(),
        "{declined:#?}"
    );
    assert_eq!(table.into_iter().collect::<Vec<_>>(), TABLE);
}

#[test]
fn captured_cache_salts_are_read() {
    let mut salted = 0;
    for case in cases().iter().filter(|case| case.status == 200) {
        let Some(salt) = &case.render_cache_salt else {
            continue;
        };
        let request = openai::parse(
            Api::of_path(&case.path).unwrap(),
            case.request.get().as_bytes(),
        )
        .unwrap();
        assert_eq!(request.cache_salt.as_ref(), Some(salt), "{}", case.case);
        salted += 1;
    }
    assert_eq!(salted, 3);
}
