//! Changes of headers in a reply to Envoy.

use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3::HeaderMutation;

/// Name of a header, in lower case.
pub type HeaderKey = Arc<str>;

/// Header changes of one reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderChanges {
    set: Vec<(HeaderKey, String)>,
    remove: Vec<HeaderKey>,
}

impl HeaderChanges {
    /// Creates changes that remove these headers.
    pub fn removing(names: Vec<HeaderKey>) -> Self {
        Self {
            set: Vec::new(),
            remove: names,
        }
    }

    /// Removes another header.
    pub fn remove(&mut self, name: impl Into<HeaderKey>) {
        self.remove.push(name.into());
    }

    /// Sets a header and overwrites its previous values.
    pub fn set(&mut self, name: impl Into<HeaderKey>, value: String) {
        let name = name.into();
        self.remove.retain(|removed| *removed != name);
        self.set.push((name, value));
    }

    /// Returns the wire message; `None` without changes.
    pub(super) fn into_mutation(self) -> Option<HeaderMutation> {
        if self.set.is_empty() && self.remove.is_empty() {
            return None;
        }
        let option = |(key, value): (HeaderKey, String)| HeaderValueOption {
            header: Some(HeaderValue {
                key: key.to_string(),
                raw_value: value.into_bytes(),
                ..HeaderValue::default()
            }),
            append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
            ..HeaderValueOption::default()
        };
        Some(HeaderMutation {
            set_headers: self.set.into_iter().map(option).collect(),
            remove_headers: self.remove.iter().map(|name| name.to_string()).collect(),
        })
    }
}
