//! The cases, in the order in which they start.

use crate::runner::{PlaneKind, TestCase};

mod credentials;
mod definitions;
mod doctor;
mod faults;
mod manifests;
mod network;
mod objects;
mod permissions;
mod pods;
mod pools;
mod scale;
mod start;

macro_rules! cases {
    ($plane:ident, $module:ident: $($name:ident),+ $(,)?) => {
        [$(TestCase {
            name: concat!(stringify!($module), "::", stringify!($name)),
            plane: PlaneKind::$plane,
            run: |plane| Box::pin($module::$name(plane)),
        }),+]
    };
}

/// Returns all cases. Long cases come first.
pub(crate) fn all() -> Vec<TestCase> {
    let mut all = Vec::new();
    all.extend(cases![Shared, scale: five_hundred_pods, quiet_cluster]);
    all.extend(cases![
        Shared, network: unanswered_requests_time_out, unavailable_while_running, silent_connections_are_replaced
    ]);
    all.extend(cases![Shared, credentials: token_replaced, authority_replaced]);
    all.extend(cases![
        Shared, start: unknown_token_replaced, wrong_authority_replaced, api_server_unavailable, account_with_newlines,
        no_service_account, pool_and_pods_exist, pool_created_later, pool_of_other_namespace, two_pools,
        pools_with_same_pods, pool_by_labels
    ]);
    all.extend(cases![
        Shared, permissions: pods_forbidden, pools_forbidden, watch_without_list, rights_taken_away, list_without_watch,
        optional_kinds_without_watch
    ]);
    all.extend(cases![
        Shared, pods: readiness_changes, deletion_with_grace, deletion_without_grace, address_changes,
        two_pods_with_one_address, address_of_ending_pod, labels_change, container_restart, ipv6_addresses,
        rapid_readiness, unreadable_address
    ]);
    all.extend(cases![Shared, pools: ports_change, event_ports, selector_changes, pool_deleted]);
    all.extend(cases![
        Shared, objects: rights_granted_later, objectives_change, rewrites_change, rewrite_takes_effect,
        objects_without_spec, explain_applies_rewrites
    ]);
    all.extend(cases![Shared, doctor: absent_pool, unusable_pods, missing_rights, api_server_away]);
    all.extend(cases![
        Shared, manifests: overlays_are_accepted, chart_is_accepted, chart_renderings_are_current, wrong_values_are_rejected
    ]);
    all.extend(cases![
        Definitions, definitions: pool_definition_installed_later, pool_definition_deleted, optional_definitions_change
    ]);
    all.extend(cases![
        Faults, faults: restart, kill, freeze, etcd_away, start_before_api_server, live_watch_survives_compaction,
        missed_changes_are_listed, expired_watches_are_listed
    ]);
    all
}
