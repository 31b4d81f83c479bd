//! JSON Schemas of the settings files.

use warmroute_settings::settings_schema;

use super::Config;
use crate::fleet::discovery::config::WorkerConfig;

/// Returns the JSON Schema of the configuration file.
pub fn config_schema() -> String {
    settings_schema::<Config>("Configuration of warmroute")
}

/// Returns the JSON Schema of the workers file.
pub fn workers_schema() -> String {
    settings_schema::<Vec<WorkerConfig>>("Workers of warmroute")
}
