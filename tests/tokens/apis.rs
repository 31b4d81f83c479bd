//! Requests to four APIs, compared with the tokens of vLLM 0.32
//! (`tests/data/tokens/apis-qwen2_5.json.gz`). The outcome of every case is asserted, so that a
//! regression becomes visible.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;
use warmroute_tokens::openai::{self, ApiKind};
use warmroute_tokens::prompt::TokenExactness;

use super::QWEN;
use super::further::contents;

/// Context length of the captured engine (`--max-model-len`).
const MAX_MODEL_LEN: u64 = 16384;

#[derive(Deserialize)]
struct ApiCase {
    case: String,
    path: String,
    request: Box<RawValue>,
    status: u16,
    token_ids: Box<RawValue>,
    /// Cache salt that the engine applied.
    #[serde(default)]
    render_cache_salt: Option<String>,
}

/// Outcomes of the cases of one API.
#[derive(Debug, Default, PartialEq, Eq)]
struct CaseOutcomes {
    /// Cases whose tokens equal those of the engine.
    equal: usize,
    /// Cases whose tokens differ from those of the engine.
    different: usize,
    /// Cases that the engine accepts and this encoder does not tokenize.
    declined: usize,
    /// Cases that the engine rejects.
    refused: usize,
}

enum ApiOutcome {
    Equal,
    Different,
    Declined(String),
    Refused,
}

/// Expected outcomes.
const TABLE: [(&str, CaseOutcomes); 4] = [
    (
        "/inference/v1/generate",
        CaseOutcomes {
            equal: 19,
            different: 0,
            declined: 0,
            refused: 11,
        },
    ),
    (
        "/v1/chat/completions",
        CaseOutcomes {
            equal: 39,
            different: 0,
            declined: 1,
            refused: 10,
        },
    ),
    (
        "/v1/messages",
        CaseOutcomes {
            equal: 64,
            different: 0,
            declined: 1,
            refused: 7,
        },
    ),
    (
        "/v1/responses",
        CaseOutcomes {
            equal: 76,
            different: 0,
            declined: 2,
            refused: 14,
        },
    ),
];

/// Cases that are not tokenized, with the reason.
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

fn cases() -> Vec<ApiCase> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/apis-qwen2_5.json.gz");
    serde_json::from_slice(&contents(&data)).unwrap()
}

fn outcome(case: &ApiCase) -> ApiOutcome {
    let api = ApiKind::from_path(&case.path).unwrap();
    let read = openai::parse(api, case.request.get().as_bytes());
    if case.status != 200 {
        return ApiOutcome::Refused;
    }
    let engine: Vec<u32> = serde_json::from_str(case.token_ids.get()).unwrap();
    let mut request = match read {
        Ok(request) => request,
        Err(error) => return ApiOutcome::Declined(error.to_string()),
    };
    request.resolve_truncation(MAX_MODEL_LEN);
    match QWEN.encode(&request) {
        Ok(encoded)
            if encoded.exactness == TokenExactness::Exact && encoded.prompts == [engine] =>
        {
            ApiOutcome::Equal
        }
        Ok(_) => ApiOutcome::Different,
        Err(error) => ApiOutcome::Declined(error.to_string()),
    }
}

#[test]
fn captured_api_requests_match_outcome_table() {
    let cases = cases();
    assert_eq!(cases.len(), 244);
    let (mut table, mut declined, mut different) = (
        BTreeMap::<&str, CaseOutcomes>::new(),
        Vec::new(),
        Vec::new(),
    );
    for case in &cases {
        let outcomes = table.entry(&case.path).or_default();
        match outcome(case) {
            ApiOutcome::Equal => outcomes.equal += 1,
            ApiOutcome::Different => {
                outcomes.different += 1;
                different.push(&case.case);
            }
            ApiOutcome::Declined(why) => {
                outcomes.declined += 1;
                declined.push((case.case.as_str(), why));
            }
            ApiOutcome::Refused => outcomes.refused += 1,
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
            ApiKind::from_path(&case.path).unwrap(),
            case.request.get().as_bytes(),
        )
        .unwrap();
        assert_eq!(request.cache_salt.as_ref(), Some(salt), "{}", case.case);
        salted += 1;
    }
    assert_eq!(salted, 3);
}
