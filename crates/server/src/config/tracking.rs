//! `routing.block_hash:`: hash that identifies prompt blocks in the load tracker. Keyed hashes
//! reveal nothing about prompts without the key. The key is in a separate file, so that the
//! configuration can be shown.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use warmroute_settings::{MAX_SECRET_FILE, Problem, describe_missing_file, read_regular_file};

use crate::tracking_hash::{TrackingHash, TrackingKey};

/// Hash family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TrackingFamily {
    /// The public sequence hashes.
    #[default]
    #[serde(rename = "public-xxh3-v1")]
    Public,
    /// Hashes with a secret key.
    #[serde(rename = "keyed-xxh3-v1")]
    Keyed,
}

/// The `routing.block_hash:` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrackingHashConfig {
    /// Hash family.
    pub algorithm: TrackingFamily,
    /// File with the 32 raw bytes of the key.
    pub key_file: Option<PathBuf>,
    /// Id of the key. All replicas need the same key with the same id.
    pub key_id: Option<String>,
}

impl TrackingHashConfig {
    /// Returns the configured hash. Reads the key from its file, if there is one.
    pub fn load(&self) -> Result<TrackingHash, Problem> {
        if self.algorithm == TrackingFamily::Public {
            let given = [
                ("key_file", self.key_file.is_some()),
                ("key_id", self.key_id.is_some()),
            ];
            return match given.into_iter().find(|(_, given)| *given) {
                Some((name, _)) => {
                    let text = "public names need no key, so this has no effect; write `algorithm: \
                        keyed-xxh3-v1`, or leave it out";
                    Err(Problem::of(name, text))
                }
                None => Ok(TrackingHash::Public),
            };
        }
        let Some(file) = &self.key_file else {
            return Err(Problem::of(
                "algorithm",
                "this family needs a key; name its file as `key_file`",
            ));
        };
        let id = self.key_id.as_deref().filter(|id| !id.is_empty());
        let id = id.ok_or_else(|| {
            Problem::of(
                "algorithm",
                "this family needs a key; give its name as `key_id`",
            )
        })?;
        if !file.exists() {
            return Err(Problem::of("key_file", describe_missing_file(file)));
        }
        let unreadable = |error| {
            Problem::of(
                "key_file",
                format!("{} cannot be read: {error}", file.display()),
            )
        };
        let bytes = read_regular_file(file, MAX_SECRET_FILE).map_err(unreadable)?;
        let secret: [u8; TrackingKey::LEN] = bytes.try_into().map_err(|bytes: Vec<u8>| {
            let text = format!(
                "{} has {} bytes; a key has {}, raw",
                file.display(),
                bytes.len(),
                TrackingKey::LEN
            );
            Problem::of("key_file", text)
        })?;
        Ok(TrackingHash::Keyed(TrackingKey::new(id, secret)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_needs_32_bytes_and_a_name() {
        let directory = tempfile::tempdir().unwrap();
        let keyed = |bytes: usize| {
            std::fs::write(directory.path().join("key"), vec![7; bytes]).unwrap();
            let config = TrackingHashConfig {
                algorithm: TrackingFamily::Keyed,
                key_file: Some(directory.path().join("key")),
                key_id: Some("k1".into()),
            };
            config.load()
        };
        assert_eq!(
            TrackingHashConfig::default().load(),
            Ok(TrackingHash::Public)
        );
        assert_eq!(
            keyed(32),
            Ok(TrackingHash::Keyed(TrackingKey::new("k1", [7; 32])))
        );
        let problem = keyed(31).unwrap_err();
        assert!(problem.text.contains("has 31 bytes"), "{}", problem.text);
    }
}
