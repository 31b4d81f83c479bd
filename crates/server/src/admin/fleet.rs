//! `/debug/fleet`: the workers, the state of each rank's KV event source, and the settings that
//! engines report.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use warmroute_core::router::Router;

use super::AdminState;

pub(super) async fn fleet_page(State(admin): State<AdminState>) -> Json<Value> {
    Json(fleet_json(admin.dispatcher.router()))
}

fn fleet_json(router: &Router) -> Value {
    let fleet = router.fleet();
    let mut page = json!(*fleet);
    let health_report = router.health_report();
    let unreachable = router.unreachable_workers();
    let slow = router.load().slow_ranks();
    let members = page["members"]
        .as_array_mut()
        .map(Vec::as_mut_slice)
        .unwrap_or_default();
    for (entry, member) in members.iter_mut().zip(fleet.members()) {
        let mut source = json!(router.source_status(member.rank));
        let facts = json!(router.sources().facts(member.rank));
        if let (Some(source), Value::Object(facts)) = (source.as_object_mut(), facts) {
            source.extend(facts);
        }
        entry["source"] = source;
        let health = health_report.iter().find(|row| row.rank == member.rank);
        entry["health"] = json!(health);
        let slow = slow.iter().find(|slow| slow.rank == member.rank);
        entry["slow"] = json!(slow);
        let unreachable = unreachable.get(&member.rank.worker);
        entry["unreachable_seconds"] = json!(unreachable.map(Duration::as_secs));
        if let Some((settings, mismatches)) = router.sources().engine_settings(member.rank.worker) {
            entry["engine_settings"] = json!(settings);
            entry["mismatches"] = json!(mismatches);
        }
    }
    page
}
