//! `tracking_hash:`: under which names the load counts prompt blocks. With a key the names say nothing to those who lack
//! it; the key lies in a file of its own, so that the configuration can be shown.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::model::missing;
use crate::block::TrackingHash;
use crate::block::tracking::Key;
use crate::settings::Problem;

/// The family of names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrackingFamily {
    /// The public sequence hashes.
    #[default]
    #[serde(rename = "public-xxh3-v1")]
    Public,
    /// Hashes that need the key.
    #[serde(rename = "keyed-xxh3-v1")]
    Keyed,
}

/// `tracking_hash:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrackingHashConfig {
    /// Which names.
    pub family: TrackingFamily,
    /// File with the 32 bytes of the key, raw.
    pub key_file: Option<PathBuf>,
    /// Name of the key; all routers that share load figures need the same key under the same name.
    pub key_id: Option<String>,
}

impl TrackingHashConfig {
    pub(super) fn resolve(&mut self, folder: &Path) {
        if let Some(file) = &mut self.key_file {
            *file = folder.join(&*file);
        }
    }

    /// Reads the key.
    pub fn load(&self) -> Result<TrackingHash, Problem> {
        if self.family == TrackingFamily::Public {
            let given = [
                ("key_file", self.key_file.is_some()),
                ("key_id", self.key_id.is_some()),
            ];
            return match given.into_iter().find(|(_, given)| *given) {
                Some((name, _)) => {
                    let text = "public names need no key, so this has no effect; write `family: keyed-xxh3-v1`, or leave it out";
                    Err(Problem::of(name, text))
                }
                None => Ok(TrackingHash::Public),
            };
        }
        let Some(file) = &self.key_file else {
            return Err(Problem::of(
                "family",
                "this family needs a key; name its file as `key_file`",
            ));
        };
        let id = self.key_id.as_deref().filter(|id| !id.is_empty());
        let id = id.ok_or_else(|| {
            Problem::of(
                "family",
                "this family needs a key; give its name as `key_id`",
            )
        })?;
        if !file.is_file() {
            return Err(Problem::of("key_file", missing(file)));
        }
        let unreadable = |error| {
            Problem::of(
                "key_file",
                format!("{} cannot be read: {error}", file.display()),
            )
        };
        let bytes = std::fs::read(file).map_err(unreadable)?;
        let secret: [u8; Key::LEN] = bytes.try_into().map_err(|bytes: Vec<u8>| {
            let text = format!(
                "{} has {} bytes; a key has {}, raw",
                file.display(),
                bytes.len(),
                Key::LEN
            );
            Problem::of("key_file", text)
        })?;
        Ok(TrackingHash::Keyed(Key::new(id, secret)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_32_bytes_with_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: usize| {
            std::fs::write(folder.path().join(name), vec![7; bytes]).unwrap();
            Some(PathBuf::from(name))
        };
        let keyed = |key_file, key_id: Option<&str>| {
            let key_id = key_id.map(str::to_owned);
            let mut config = TrackingHashConfig {
                family: TrackingFamily::Keyed,
                key_file,
                key_id,
            };
            config.resolve(folder.path());
            config.load()
        };
        assert_eq!(
            TrackingHashConfig::default().load().unwrap(),
            TrackingHash::Public
        );
        assert_eq!(
            keyed(file("good", 32), Some("k1")).unwrap(),
            TrackingHash::Keyed(Key::new("k1", [7; 32]))
        );
        let cases = [
            (None, Some("k1"), "name its file"),
            (file("good", 32), None, "give its name"),
            (file("good", 32), Some(""), "give its name"),
            (file("short", 31), Some("k1"), "has 31 bytes"),
            (Some("none".into()), Some("k1"), "does not exist"),
        ];
        for (file, id, expected) in cases {
            let problem = keyed(file, id).unwrap_err();
            assert!(problem.text.contains(expected), "{}", problem.text);
        }
        let public = TrackingHashConfig {
            key_id: Some("k1".into()),
            ..TrackingHashConfig::default()
        };
        assert!(public.load().unwrap_err().text.contains("no effect"));
    }
}
