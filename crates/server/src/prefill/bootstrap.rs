//! SGLang's bootstrap fields, by which a prefill and a decode worker with the same request find
//! each other. The room number is drawn per request and encodes the rank of the prefill worker.

use std::sync::Arc;

use bytes::Bytes;
use rand::{Rng, RngExt as _};
use serde_json::Value;
use warmroute_core::worker::{DpRank, RankRange};
use warmroute_tokens::openai::ApiKind;
use warmroute_tokens::openai::json_edit::{self, FieldEdit};

use super::handoff::{self, SplitError};

/// Room number. Below 2^63, because engines store it in a signed integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BootstrapRoom(u64);

impl BootstrapRoom {
    /// Draws a room for a rank of a prefill worker: the room modulo the number of ranks is the
    /// index of the rank.
    pub(super) fn draw(ranks: RankRange, rank: DpRank, random: &mut impl Rng) -> Self {
        let size = u64::from(ranks.size.get());
        let index = u64::from(rank.0.saturating_sub(ranks.start)) % size;
        let rooms_per_rank = (1 << 63) / size;
        Self(random.random_range(0..rooms_per_rank) * size + index)
    }
}

/// Bootstrap fields of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BootstrapInfo {
    /// Host of the prefill worker.
    pub(super) host: String,
    /// Port of the prefill worker's bootstrap server.
    pub(super) port: u16,
    /// The room.
    pub(super) room: BootstrapRoom,
    /// Request id for both engines, unless the client has set one.
    pub(super) request_id: Arc<str>,
}

/// A body with bootstrap fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BootstrapBody {
    /// The body for both workers.
    pub(super) body: Bytes,
    /// Whether the request id is warmroute's.
    pub(super) has_own_request_id: bool,
}

/// Checks whether a request can be mirrored. Several prompts are supported: engines use consecutive
/// rooms for them.
pub(super) fn check_mirrorable(api: Option<ApiKind>, body: &[u8]) -> Result<(), SplitError> {
    if !matches!(
        api,
        Some(ApiKind::ChatCompletions | ApiKind::Completions | ApiKind::SglangGenerate)
    ) {
        return Err(SplitError::Api);
    }
    let fields = json_edit::find_values(body, &["n", "sampling_params"]).ok_or(SplitError::Body)?;
    // Engines disagree on the rooms of several outputs.
    let is_several = |(field, json): &(usize, &[u8])| match field {
        0 => !matches!(*json, b"1" | b"null"),
        _ => json_edit::find_values(json, &["n"])
            .is_some_and(|fields| fields.iter().any(|(_, n)| !matches!(*n, b"1" | b"null"))),
    };
    if fields.iter().any(is_several) {
        Err(SplitError::MultipleChoices)
    } else {
        Ok(())
    }
}

/// Returns the request ids in the engines: several for a request with several prompts.
pub(super) fn engine_request_ids(request_id: &Arc<str>, body: &[u8]) -> Arc<[Arc<str>]> {
    let fields = json_edit::find_values(body, &["prompt", "text", "input_ids"]).unwrap_or_default();
    match fields
        .iter()
        .map(|(_, json)| handoff::count_prompts(json))
        .max()
    {
        Some(count @ 2..) => (0..count)
            .map(|at| format!("{request_id}_{at}").into())
            .collect(),
        _ => [request_id.clone()].into(),
    }
}

/// Returns whether the response is streamed.
pub(super) fn is_streaming(body: &[u8]) -> bool {
    json_edit::find_values(body, &["stream"])
        .is_some_and(|fields| fields.iter().any(|(_, json)| *json == b"true"))
}

impl BootstrapInfo {
    /// Adds the fields to a body. Returns `None` if the body is not a JSON object. `previous` is
    /// warmroute's request id of an earlier attempt.
    pub(super) fn add_to_body(&self, body: &[u8], previous: Option<&str>) -> Option<BootstrapBody> {
        let request_ids = json_edit::find_values(body, &["rid"])?;
        let previous = previous.map(|name| Value::from(name).to_string());
        let is_ours = |json: &[u8]| {
            json == b"null"
                || previous
                    .as_ref()
                    .is_some_and(|name| name.as_bytes() == json)
        };
        let has_own_request_id = request_ids.iter().all(|(_, json)| is_ours(json));
        let host = Value::from(&*self.host).to_string();
        let request_id = Value::from(&*self.request_id).to_string();
        let port = self.port.to_string();
        let room = self.room.0.to_string();
        let mut changes = vec![
            FieldEdit::set("bootstrap_host", host.as_bytes()),
            FieldEdit::set("bootstrap_port", port.as_bytes()),
            FieldEdit::set("bootstrap_room", room.as_bytes()),
        ];
        changes.extend(has_own_request_id.then(|| FieldEdit::set("rid", request_id.as_bytes())));
        Some(BootstrapBody {
            body: json_edit::apply_edits(body, &changes)?.into(),
            has_own_request_id,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use rand::SeedableRng as _;
    use rand::rngs::StdRng;
    use serde_json::json;

    use super::*;

    #[test]
    fn room_encodes_rank_and_fits_signed_integer() {
        let mut random = StdRng::seed_from_u64(7);
        let mut seen = std::collections::BTreeSet::new();
        for (start, size, rank) in [(0, 1, 0), (0, 4, 3), (8, 3, 9), (0, 1024, 1023), (5, 7, 5)] {
            let ranks = RankRange {
                start,
                size: NonZeroU32::new(size).unwrap(),
            };
            for _ in 0..1000 {
                let room = BootstrapRoom::draw(ranks, DpRank(rank), &mut random).0;
                assert_eq!(room % u64::from(size), u64::from(rank - start));
                assert!(room < 1 << 63);
                assert!(seen.insert(room), "no room is drawn twice");
            }
        }
        assert!(seen.last().unwrap() > &(1 << 62), "the whole range is used");
    }

    fn info() -> BootstrapInfo {
        BootstrapInfo {
            host: "10.0.0.1".to_owned(),
            port: 8998,
            room: BootstrapRoom(1 << 62),
            request_id: "ours".into(),
        }
    }

    #[test]
    fn bootstrap_fields_are_added_and_rest_unchanged() {
        let body = br#"{"model":"m", "big":123456789012345678901,"messages":[]}"#;
        let BootstrapBody {
            body: sent,
            has_own_request_id,
        } = info().add_to_body(body, None).unwrap();
        assert!(has_own_request_id);
        let expected = r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":4611686018427387904,"rid":"ours","model":"m", "big":123456789012345678901,"messages":[]}"#;
        assert_eq!(std::str::from_utf8(&sent).unwrap(), expected);
    }

    #[test]
    fn client_request_id_is_kept_and_room_replaced() {
        let body = json!({"rid": "theirs", "bootstrap_room": 1, "bootstrap_host": "elsewhere", "prompt": "x"});
        let BootstrapBody {
            body: sent,
            has_own_request_id,
        } = info()
            .add_to_body(body.to_string().as_bytes(), None)
            .unwrap();
        let sent: Value = serde_json::from_slice(&sent).unwrap();
        assert_eq!(
            (&sent["rid"], has_own_request_id),
            (&json!("theirs"), false)
        );
        assert_eq!(
            (&sent["bootstrap_room"], &sent["bootstrap_host"]),
            (&json!(1_u64 << 62), &json!("10.0.0.1"))
        );
    }

    #[test]
    fn retry_replaces_only_own_request_id() {
        for (rid, previous, expected, is_own) in [
            (json!("earlier"), Some("earlier"), json!("ours"), true),
            (json!("theirs"), Some("earlier"), json!("theirs"), false),
            (json!("earlier"), None, json!("earlier"), false),
        ] {
            let body = json!({"rid": rid, "bootstrap_room": 7, "prompt": "x"}).to_string();
            let BootstrapBody {
                body: sent,
                has_own_request_id,
            } = info().add_to_body(body.as_bytes(), previous).unwrap();
            let sent: Value = serde_json::from_slice(&sent).unwrap();
            assert_eq!((&sent["rid"], has_own_request_id), (&expected, is_own));
            assert_eq!(sent["bootstrap_room"], json!(1_u64 << 62));
        }
    }

    #[test]
    fn several_prompts_have_several_engine_ids() {
        for (body, expected) in [
            (json!({"prompt": "x"}), &["r"][..]),
            (json!({"prompt": [1, 2]}), &["r"]),
            (json!({"messages": []}), &["r"]),
            (json!({"prompt": ["a", "b"]}), &["r_0", "r_1"]),
            (
                json!({"input_ids": [[1], [2], [3]]}),
                &["r_0", "r_1", "r_2"],
            ),
        ] {
            let names = engine_request_ids(&"r".into(), body.to_string().as_bytes());
            assert_eq!(
                names.iter().map(|name| &**name).collect::<Vec<_>>(),
                expected,
                "{body}"
            );
        }
    }

    #[test]
    fn unsupported_requests_are_not_mirrored() {
        for (api, body, expected) in [
            (
                Some(ApiKind::ChatCompletions),
                json!({"messages": [], "rid": "x", "n": 1}),
                Ok(()),
            ),
            (
                Some(ApiKind::ChatCompletions),
                json!({"messages": [], "n": 2}),
                Err(SplitError::MultipleChoices),
            ),
            (
                Some(ApiKind::SglangGenerate),
                json!({"sampling_params": {"n": 3}}),
                Err(SplitError::MultipleChoices),
            ),
            (
                Some(ApiKind::SglangGenerate),
                json!({"input_ids": [[1], [2]]}),
                Ok(()),
            ),
            (
                Some(ApiKind::Completions),
                json!({"prompt": ["a", "b"], "rid": ["x", "y"]}),
                Ok(()),
            ),
            (Some(ApiKind::Responses), json!({}), Err(SplitError::Api)),
            (None, json!({}), Err(SplitError::Api)),
            (
                Some(ApiKind::ChatCompletions),
                json!([]),
                Err(SplitError::Body),
            ),
        ] {
            assert_eq!(
                check_mirrorable(api, body.to_string().as_bytes()),
                expected,
                "{body}"
            );
        }
    }
}
