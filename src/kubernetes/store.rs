//! Last received objects of one kind. An object that cannot be parsed is stored as its error and
//! does not affect the others.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Maximum number of objects of a query. Further ones are ignored, with a warning.
pub(super) const MAX_OBJECTS: usize = 20_000;

/// An object that does not have the expected form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnreadableObject {
    /// `namespace/name`.
    pub(super) name: String,
    pub(super) reason: String,
}

impl UnreadableObject {
    /// Returns a description for logs and status pages.
    pub(super) fn describe(&self, kind: &str) -> String {
        format!(
            "{kind} {} cannot be read, so it is ignored: {}",
            self.name, self.reason
        )
    }
}

/// Object as received.
#[derive(Clone, Debug)]
pub(super) struct ReceivedObject<K> {
    pub(super) uid: String,
    pub(super) resource_version: Option<String>,
    pub(super) object: Result<K, UnreadableObject>,
}

/// Identifying metadata of an object.
#[derive(Deserialize)]
struct ObjectIdentity {
    #[serde(default)]
    metadata: IdentityMetadata,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct IdentityMetadata {
    namespace: Option<String>,
    name: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
}

impl<K: DeserializeOwned> ReceivedObject<K> {
    /// Parses one object from JSON.
    pub(super) fn parse(text: &str) -> Self {
        let identity =
            serde_json::from_str::<ObjectIdentity>(text).map(|identity| identity.metadata);
        let IdentityMetadata {
            namespace,
            name,
            uid,
            resource_version,
        } = identity.unwrap_or_default();
        let name = format!(
            "{}/{}",
            namespace.unwrap_or_default(),
            name.unwrap_or_default()
        );
        let object = serde_json::from_str(text);
        let object = object.map_err(|error: serde_json::Error| {
            // Positions in the text are removed, because operators cannot see the text.
            let reason = error.to_string();
            let reason = reason
                .split(" at line ")
                .next()
                .unwrap_or_default()
                .to_owned();
            UnreadableObject {
                name: name.clone(),
                reason,
            }
        });
        Self {
            uid: uid.unwrap_or(name),
            resource_version,
            object,
        }
    }
}

/// Change of the stored objects.
#[derive(Clone, Debug)]
pub(super) enum ObjectChange<K> {
    /// Complete list of objects.
    Listed(Vec<ReceivedObject<K>>),
    Applied(ReceivedObject<K>),
    /// Uid of a deleted object.
    Deleted(String),
}

/// Objects of one kind by uid.
#[derive(Clone, Debug)]
pub(super) struct ObjectStore<K> {
    objects: BTreeMap<String, K>,
    unreadable: BTreeMap<String, UnreadableObject>,
    is_listed: bool,
    /// True if an object was ignored since the last list.
    has_overflowed: bool,
}

impl<K> Default for ObjectStore<K> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            is_listed: false,
            has_overflowed: false,
        }
    }
}

impl<K> ObjectStore<K> {
    pub(super) fn apply(&mut self, change: ObjectChange<K>) {
        match change {
            ObjectChange::Listed(all) => {
                *self = Self {
                    is_listed: true,
                    ..Self::default()
                };
                all.into_iter().for_each(|object| self.insert(object));
            }
            ObjectChange::Applied(object) => self.insert(object),
            ObjectChange::Deleted(uid) => self.remove(&uid),
        }
    }

    fn insert(&mut self, received: ReceivedObject<K>) {
        self.remove(&received.uid);
        if self.objects.len() + self.unreadable.len() >= MAX_OBJECTS {
            if !std::mem::replace(&mut self.has_overflowed, true) {
                tracing::warn!(
                    limit = MAX_OBJECTS,
                    "a Kubernetes query selects too many objects; the excess is ignored"
                );
            }
            return;
        }
        match received.object {
            Ok(object) => drop(self.objects.insert(received.uid, object)),
            Err(unreadable) => drop(self.unreadable.insert(received.uid, unreadable)),
        }
    }

    fn remove(&mut self, uid: &str) {
        self.objects.remove(uid);
        self.unreadable.remove(uid);
    }

    /// Removes all objects. `is_listed` stays unchanged.
    pub(super) fn clear(&mut self) {
        *self = Self {
            is_listed: self.is_listed,
            ..Self::default()
        };
    }

    pub(super) fn is_listed(&self) -> bool {
        self.is_listed
    }

    pub(super) fn objects(&self) -> &BTreeMap<String, K> {
        &self.objects
    }

    pub(super) fn unreadable(&self) -> impl Iterator<Item = &UnreadableObject> {
        self.unreadable.values()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kubernetes::objects::{InferenceObjective, Pod};

    fn pod(uid: &str, ip: &str) -> ReceivedObject<Pod> {
        let metadata = json!({"namespace": "n", "name": uid, "uid": uid, "resourceVersion": "5"});
        let object =
            json!({"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": ip}});
        ReceivedObject::parse(&object.to_string())
    }

    #[test]
    fn unreadable_pod_leaves_others_in_store() {
        let mut store = ObjectStore::default();
        store.apply(ObjectChange::Listed(vec![
            pod("a", "10.0.0.1"),
            pod("invalid", "010.000.001.007"),
        ]));
        assert_eq!(store.objects().keys().collect::<Vec<_>>(), ["a"]);
        let problems: Vec<_> = store
            .unreadable()
            .map(|object| object.describe("pod"))
            .collect();
        assert_eq!(
            problems,
            [
                "pod n/invalid cannot be read, so it is ignored: podIP `010.000.001.007` is not an IP address"
            ]
        );
        // An object that becomes unreadable is removed and returns when it can be read.
        store.apply(ObjectChange::Applied(pod("a", "300.1.1.1")));
        assert_eq!((store.objects().len(), store.unreadable().count()), (0, 2));
        store.apply(ObjectChange::Applied(pod("a", "10.0.0.2")));
        store.apply(ObjectChange::Deleted("invalid".to_owned()));
        assert_eq!((store.objects().len(), store.unreadable().count()), (1, 0));
    }

    #[test]
    fn objects_beyond_the_limit_are_ignored() {
        let mut store = ObjectStore::default();
        let all = (0..=MAX_OBJECTS).map(|at| pod(&format!("{at:05}"), "10.0.0.1"));
        store.apply(ObjectChange::Listed(all.collect()));
        assert_eq!(store.objects().len(), MAX_OBJECTS);
        store.apply(ObjectChange::Applied(pod("00000", "10.0.0.2")));
        store.apply(ObjectChange::Applied(pod("other", "10.0.0.2")));
        assert_eq!(store.objects().len(), MAX_OBJECTS);
        store.apply(ObjectChange::Deleted("00001".to_owned()));
        store.apply(ObjectChange::Applied(pod("other", "10.0.0.2")));
        assert!(store.objects().contains_key("other"));
    }

    #[test]
    fn objective_without_spec_is_named() {
        let text = json!({"metadata": {"namespace": "n", "name": "empty", "uid": "u"}}).to_string();
        let received: ReceivedObject<InferenceObjective> = ReceivedObject::parse(&text);
        assert_eq!(received.uid, "u");
        let problem = received.object.unwrap_err().describe("InferenceObjective");
        assert_eq!(
            problem,
            "InferenceObjective n/empty cannot be read, so it is ignored: missing field `spec`"
        );
    }
}
