//! Idle sessions in the order of their last use, over all tenants and for each tenant, and how many sessions each tenant has.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::table::Key;

/// When a session became idle, and its number.
type LastUse = (Instant, u64);

/// The sessions of one tenant.
#[derive(Debug, Default)]
struct TenantSessions {
    count: usize,
    idle: BTreeSet<LastUse>,
}

/// Counts of sessions, and the idle ones among them.
#[derive(Debug, Default)]
pub(super) struct TenantTable {
    idle: BTreeMap<LastUse, Arc<Key>>,
    /// Only sessions that have a tenant.
    tenants: HashMap<Arc<str>, TenantSessions>,
}

impl TenantTable {
    /// Counts a session that was added.
    pub(super) fn add(&mut self, key: &Key) {
        if let Some(tenant) = &key.tenant {
            self.tenants.entry(tenant.clone()).or_default().count += 1;
        }
    }

    /// Counts a session that was removed, and is not idle any more.
    pub(super) fn remove(&mut self, key: &Key) {
        let Some(tenant) = &key.tenant else { return };
        let Some(sessions) = self.tenants.get_mut(tenant) else {
            return;
        };
        sessions.count -= 1;
        if sessions.count == 0 {
            self.tenants.remove(tenant);
        }
    }

    /// Sessions of a tenant.
    pub(super) fn count(&self, tenant: &str) -> usize {
        self.tenants
            .get(tenant)
            .map_or(0, |sessions| sessions.count)
    }

    /// Marks a session as idle.
    pub(super) fn set_idle(&mut self, last_use: LastUse, key: Arc<Key>) {
        if let Some(tenant) = &key.tenant {
            self.tenants
                .entry(tenant.clone())
                .or_default()
                .idle
                .insert(last_use);
        }
        self.idle.insert(last_use, key);
    }

    /// Marks a session as not idle: a request of it runs again, or it is removed.
    pub(super) fn unset_idle(&mut self, last_use: LastUse) -> Option<Arc<Key>> {
        let key = self.idle.remove(&last_use)?;
        if let Some(sessions) = key
            .tenant
            .as_ref()
            .and_then(|tenant| self.tenants.get_mut(tenant))
        {
            sessions.idle.remove(&last_use);
        }
        Some(key)
    }

    /// The session that is idle for longest.
    pub(super) fn oldest(&self) -> Option<LastUse> {
        self.idle.first_key_value().map(|(last_use, _)| *last_use)
    }

    /// The session of a tenant that is idle for longest.
    pub(super) fn oldest_of(&self, tenant: &str) -> Option<LastUse> {
        self.tenants.get(tenant)?.idle.first().copied()
    }
}
