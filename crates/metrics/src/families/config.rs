//! Metrics of the configuration file.

use crate::*;

metrics! {
    /// Metrics of the configuration file.
    ConfigMetrics {
        /// Generation of the configuration in use: 1 at startup, one more after each applied reload
        "config_generation" generation: Gauge = Gauge::default();
        /// 1 if the last read of the configuration file succeeded, 0 while an invalid file is
        /// ignored
        "config_last_reload_successful" last_reload_successful: Gauge = Gauge::default();
        /// Unix time of the last successful read of the configuration file
        "config_last_reload_success_timestamp_seconds" last_reload_success_timestamp_seconds: FloatGauge = Gauge::default();
        /// Keys of the configuration file whose new values take effect only after a restart
        "config_pending_restart_keys" pending_restart_keys: Gauge = Gauge::default();
        /// Reads of the configuration file after startup, by outcome: applied, unchanged, invalid
        "config_reloads" reloads: Family<OutcomeLabel, Counter> = outcomes(&["applied", "unchanged", "invalid"]);
    }
}
