//! Rooms in which a prefill and a decode worker meet that got the same request: SGLang's bootstrap fields. The number of the
//! room is drawn for every request, and tells the decode worker which of the prefill worker's ranks has it.

use std::sync::Arc;

use bytes::Bytes;
use rand::{Rng, RngExt as _};
use serde_json::Value;

use super::handover::{self, Unfit};
use crate::openai::Api;
use crate::openai::edit::{self, Change};
use crate::worker::{DpRank, Ranks};

/// The number of a room: below 2^63, because engines keep it in a signed number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Room(u64);

impl Room {
    /// A room for a rank of a prefill worker: its number leaves the rank's place when it is divided by their count.
    pub(super) fn draw(ranks: Ranks, rank: DpRank, random: &mut impl Rng) -> Self {
        let size = u64::from(ranks.size.get());
        let place = u64::from(rank.0.saturating_sub(ranks.start)) % size;
        let whole = (1 << 63) / size;
        Self(random.random_range(0..whole) * size + place)
    }
}

/// Where two workers meet over one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Meeting {
    /// The prefill worker's host.
    pub(super) host: String,
    /// The port of its bootstrap server.
    pub(super) port: u16,
    /// The room.
    pub(super) room: Room,
    /// What both engines shall call the request, unless the client gave it a name.
    pub(super) request: Arc<str>,
}

/// The way to a meeting, in a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Invited {
    /// The body that both workers get.
    pub(super) body: Bytes,
    /// Whether the request has our name.
    pub(super) named_by_us: bool,
}

/// Whether two workers can meet over a request. Of several prompts engines count on from the room by themselves.
pub fn fits(api: Option<Api>, body: &[u8]) -> Result<(), Unfit> {
    if !matches!(
        api,
        Some(Api::ChatCompletions | Api::Completions | Api::SglangGenerate)
    ) {
        return Err(Unfit::Api);
    }
    let said = edit::look(body, &["n", "sampling_params"]).ok_or(Unfit::Body)?;
    // Which rooms engines then mean differs from one to the next.
    let several = |(of, json): &(usize, &[u8])| match of {
        0 => !matches!(*json, b"1" | b"null"),
        _ => edit::look(json, &["n"])
            .is_some_and(|said| said.iter().any(|(_, n)| !matches!(*n, b"1" | b"null"))),
    };
    if said.iter().any(several) {
        Err(Unfit::Several)
    } else {
        Ok(())
    }
}

/// What engines call a request, or the parts of one with several prompts.
pub(super) fn names(name: &Arc<str>, body: &[u8]) -> Arc<[Arc<str>]> {
    let said = edit::look(body, &["prompt", "text", "input_ids"]).unwrap_or_default();
    match said.iter().map(|(_, json)| handover::prompts(json)).max() {
        Some(count @ 2..) => (0..count).map(|at| format!("{name}_{at}").into()).collect(),
        _ => [name.clone()].into(),
    }
}

/// Whether the answer comes in pieces.
pub fn streams(body: &[u8]) -> bool {
    edit::look(body, &["stream"]).is_some_and(|said| said.iter().any(|(_, json)| *json == b"true"))
}

impl Meeting {
    /// The request with the way to its meeting, as both workers get it; none of a body that does not fit.
    /// `before` is the name that we gave it at an earlier try.
    pub(super) fn invite(&self, body: &[u8], before: Option<&str>) -> Option<Invited> {
        let named = edit::look(body, &["rid"])?;
        let before = before.map(|name| Value::from(name).to_string());
        let is_ours = |json: &[u8]| {
            json == b"null" || before.as_ref().is_some_and(|name| name.as_bytes() == json)
        };
        let named_by_us = named.iter().all(|(_, json)| is_ours(json));
        let (host, name) = (
            Value::from(&*self.host).to_string(),
            Value::from(&*self.request).to_string(),
        );
        let (port, room) = (self.port.to_string(), self.room.0.to_string());
        let mut changes = vec![
            Change::set("bootstrap_host", host.as_bytes()),
            Change::set("bootstrap_port", port.as_bytes()),
            Change::set("bootstrap_room", room.as_bytes()),
        ];
        changes.extend(named_by_us.then(|| Change::set("rid", name.as_bytes())));
        Some(Invited {
            body: edit::change(body, &changes)?.into(),
            named_by_us,
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
    fn a_room_says_the_place_of_its_rank_and_stays_below_the_sign() {
        let mut random = StdRng::seed_from_u64(7);
        let mut seen = std::collections::BTreeSet::new();
        for (start, size, rank) in [(0, 1, 0), (0, 4, 3), (8, 3, 9), (0, 1024, 1023), (5, 7, 5)] {
            let ranks = Ranks {
                start,
                size: NonZeroU32::new(size).unwrap(),
            };
            for _ in 0..1000 {
                let room = Room::draw(ranks, DpRank(rank), &mut random).0;
                assert_eq!(room % u64::from(size), u64::from(rank - start));
                assert!(room < 1 << 63);
                assert!(seen.insert(room), "no two are the same");
            }
        }
        assert!(seen.last().unwrap() > &(1 << 62), "the whole range is used");
    }

    fn meeting() -> Meeting {
        Meeting {
            host: "10.0.0.1".to_owned(),
            port: 8998,
            room: Room(1 << 62),
            request: "ours".into(),
        }
    }

    #[test]
    fn the_way_to_a_meeting_is_put_into_the_body_and_nothing_else_changes() {
        let body = br#"{"model":"m", "big":123456789012345678901,"messages":[]}"#;
        let Invited {
            body: sent,
            named_by_us,
        } = meeting().invite(body, None).unwrap();
        assert!(named_by_us);
        let expected = r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":4611686018427387904,"rid":"ours","model":"m", "big":123456789012345678901,"messages":[]}"#;
        assert_eq!(std::str::from_utf8(&sent).unwrap(), expected);
    }

    #[test]
    fn a_clients_own_name_holds_and_its_own_room_does_not() {
        let body = json!({"rid": "theirs", "bootstrap_room": 1, "bootstrap_host": "elsewhere", "prompt": "x"});
        let Invited {
            body: sent,
            named_by_us,
        } = meeting().invite(body.to_string().as_bytes(), None).unwrap();
        let sent: Value = serde_json::from_slice(&sent).unwrap();
        assert_eq!((&sent["rid"], named_by_us), (&json!("theirs"), false));
        assert_eq!(
            (&sent["bootstrap_room"], &sent["bootstrap_host"]),
            (&json!(1_u64 << 62), &json!("10.0.0.1"))
        );
    }

    #[test]
    fn at_another_try_only_our_own_name_gives_way() {
        for (rid, before, expected, by_us) in [
            (json!("earlier"), Some("earlier"), json!("ours"), true),
            (json!("theirs"), Some("earlier"), json!("theirs"), false),
            (json!("earlier"), None, json!("earlier"), false),
        ] {
            let body = json!({"rid": rid, "bootstrap_room": 7, "prompt": "x"}).to_string();
            let Invited {
                body: sent,
                named_by_us,
            } = meeting().invite(body.as_bytes(), before).unwrap();
            let sent: Value = serde_json::from_slice(&sent).unwrap();
            assert_eq!((&sent["rid"], named_by_us), (&expected, by_us));
            assert_eq!(sent["bootstrap_room"], json!(1_u64 << 62));
        }
    }

    #[test]
    fn the_parts_of_a_request_with_several_prompts_have_names_of_their_own() {
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
            let names = names(&"r".into(), body.to_string().as_bytes());
            assert_eq!(
                names.iter().map(|name| &**name).collect::<Vec<_>>(),
                expected,
                "{body}"
            );
        }
    }

    #[test]
    fn what_has_no_body_to_change_is_no_matter_for_a_meeting() {
        for (api, body, expected) in [
            (
                Some(Api::ChatCompletions),
                json!({"messages": [], "rid": "x", "n": 1}),
                Ok(()),
            ),
            (
                Some(Api::ChatCompletions),
                json!({"messages": [], "n": 2}),
                Err(Unfit::Several),
            ),
            (
                Some(Api::SglangGenerate),
                json!({"sampling_params": {"n": 3}}),
                Err(Unfit::Several),
            ),
            (
                Some(Api::SglangGenerate),
                json!({"input_ids": [[1], [2]]}),
                Ok(()),
            ),
            (
                Some(Api::Completions),
                json!({"prompt": ["a", "b"], "rid": ["x", "y"]}),
                Ok(()),
            ),
            (Some(Api::Responses), json!({}), Err(Unfit::Api)),
            (None, json!({}), Err(Unfit::Api)),
            (Some(Api::ChatCompletions), json!([]), Err(Unfit::Body)),
        ] {
            assert_eq!(fits(api, body.to_string().as_bytes()), expected, "{body}");
        }
    }
}
