//! Idle sessions in order of their last use, overall and per tenant, and the number of sessions per
//! tenant.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::key::SessionKey;

/// Time at which a session became idle, and its number.
type LastUse = (Instant, u64);

/// Sessions of one tenant.
#[derive(Debug, Default)]
struct TenantSessions {
    count: usize,
    idle: BTreeSet<LastUse>,
}

/// Idle sessions, and session counts per tenant.
#[derive(Debug, Default)]
pub(super) struct TenantTable {
    idle: BTreeMap<LastUse, Arc<SessionKey>>,
    /// Only sessions with a tenant.
    tenants: HashMap<Arc<str>, TenantSessions>,
}

impl TenantTable {
    /// Counts an added session.
    pub(super) fn add(&mut self, key: &SessionKey) {
        if let Some(tenant) = &key.tenant {
            self.tenants.entry(tenant.clone()).or_default().count += 1;
        }
    }

    /// Counts a removed session, which must not be marked as idle.
    pub(super) fn remove(&mut self, key: &SessionKey) {
        let Some(tenant) = &key.tenant else { return };
        let Some(sessions) = self.tenants.get_mut(tenant) else {
            return;
        };
        sessions.count -= 1;
        if sessions.count == 0 {
            self.tenants.remove(tenant);
        }
    }

    /// Returns the number of sessions of a tenant.
    pub(super) fn count(&self, tenant: &str) -> usize {
        self.tenants
            .get(tenant)
            .map_or(0, |sessions| sessions.count)
    }

    /// Marks a session as idle.
    pub(super) fn set_idle(&mut self, last_use: LastUse, key: Arc<SessionKey>) {
        if let Some(tenant) = &key.tenant {
            self.tenants
                .entry(tenant.clone())
                .or_default()
                .idle
                .insert(last_use);
        }
        self.idle.insert(last_use, key);
    }

    /// Marks a session as not idle, because a request of it runs again or it is removed.
    pub(super) fn unset_idle(&mut self, last_use: LastUse) -> Option<Arc<SessionKey>> {
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

    /// Returns the session that has been idle for longest.
    pub(super) fn oldest(&self) -> Option<LastUse> {
        self.idle.first_key_value().map(|(last_use, _)| *last_use)
    }

    /// Returns the session of a tenant that has been idle for longest.
    pub(super) fn oldest_of(&self, tenant: &str) -> Option<LastUse> {
        self.tenants.get(tenant)?.idle.first().copied()
    }
}
