//! `/debug/fleet`: who serves, how far each rank's event source can be believed and why, and what engines say of themselves.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::Admin;
use crate::router::Router;

pub(super) async fn page(State(admin): State<Admin>) -> Json<Value> {
    Json(fleet(admin.entrance.router()))
}

fn fleet(router: &Router) -> Value {
    let fleet = router.fleet();
    let mut page = json!(*fleet);
    let members = page["members"]
        .as_array_mut()
        .map(Vec::as_mut_slice)
        .unwrap_or_default();
    for (shown, member) in members.iter_mut().zip(fleet.members()) {
        let mut source = json!(router.trust(member.rank));
        let facts = json!(router.sources().facts(member.rank));
        if let (Some(source), Value::Object(facts)) = (source.as_object_mut(), facts) {
            source.extend(facts);
        }
        shown["source"] = source;
        if let Some((learned, mismatches)) = router.sources().learned(member.rank.worker) {
            shown["learned"] = json!(learned);
            shown["mismatches"] = json!(mismatches);
        }
    }
    page
}
