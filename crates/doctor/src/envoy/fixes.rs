//! Fixes in Envoy's own configuration and in the resources of control planes.

pub(super) mod settings;

use std::time::Duration;

use super::cluster::EnvoyCluster;
use super::config_node::list;
use super::control_plane::{ControlPlane, resource_name};
use super::site::FilterSite;
use crate::finding::{CheckVerdict, FindingLevel, error, note, warning};

/// Port of warmroute in the example manifests.
const DEFAULT_PORT: u16 = 9002;

/// A setting of Envoy: its fix in Envoy's own configuration, and the fixes in the resources of
/// control planes. A fix is empty if the control plane has no field for the setting. Names in
/// braces are replaced by places and by values of [`SettingFix`].
#[derive(Clone, Copy, Debug)]
pub(super) struct EnvoySetting {
    pub(super) envoy: &'static str,
    pub(super) istio: &'static str,
    pub(super) envoy_gateway: &'static str,
    pub(super) ai_gateway: &'static str,
}

impl EnvoySetting {
    /// Returns the fix with the names of a cluster.
    pub(super) fn of(&'static self, cluster: EnvoyCluster<'_>) -> SettingFix {
        let name = cluster.name();
        // Clusters of Istio are named `outbound|port|subset|host`.
        let host = name.rsplit('|').next().unwrap_or(name);
        SettingFix::from(self)
            .with("cluster", name)
            .with("host", host)
            .with("http_route", resource_name(name, 1))
    }

    /// Returns the fix with a value.
    pub(super) fn with(&'static self, name: &'static str, value: impl Into<String>) -> SettingFix {
        SettingFix::from(self).with(name, value)
    }

    /// Returns the fix with a duration, in the forms that the fields need.
    pub(super) fn lasting(&'static self, length: Duration) -> SettingFix {
        self.with("length", format_seconds(length))
            .with("seconds", format!("{}s", length.as_secs()))
            .with("milliseconds", format!("{}ms", length.as_millis()))
    }
}

/// A setting with the values of its fixes.
#[derive(Clone, Debug)]
pub(super) struct SettingFix {
    setting: &'static EnvoySetting,
    values: Vec<(&'static str, String)>,
}

impl From<&'static EnvoySetting> for SettingFix {
    fn from(setting: &'static EnvoySetting) -> Self {
        let values = Vec::new();
        Self { setting, values }
    }
}

impl SettingFix {
    /// Adds a value.
    pub(super) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.values.push((name, value.into()));
        self
    }
}

impl FilterSite<'_> {
    /// Returns the text of a fix; `None` if the control plane has no field for the setting.
    pub(super) fn fix(&self, fix: impl Into<SettingFix>) -> Option<String> {
        let fix = fix.into();
        let setting = fix.setting;
        let template = match &self.plane {
            ControlPlane::Istio(_) => setting.istio,
            ControlPlane::EnvoyGateway { .. } => setting.envoy_gateway,
            ControlPlane::EnvoyAiGateway(_) => setting.ai_gateway,
            ControlPlane::Other => setting.envoy,
        };
        (!template.is_empty()).then(|| self.render(template, &fix.values))
    }

    /// Returns a verdict with its fix. A warning without a fix becomes a note about a limit of the
    /// control plane.
    pub(super) fn report(
        &self,
        level: FindingLevel,
        message: impl Into<String>,
        fix: impl Into<SettingFix>,
    ) -> CheckVerdict {
        let fix = fix.into();
        let message = message.into();
        let plane = self.plane.name();
        match (self.fix(fix.clone()), level) {
            (Some(fix), FindingLevel::Error) => error(message, fix),
            (Some(fix), _) => warning(message, fix),
            (None, FindingLevel::Error) => {
                let own = self.own_fix(&fix);
                let fix =
                    format!("{plane} has no field for it; in Envoy's own configuration: {own}");
                error(message, fix)
            }
            (None, _) => note(format!("{message}; {plane} has no field for it")),
        }
    }

    /// Returns the text of a fix in Envoy's own configuration.
    pub(super) fn own_fix(&self, fix: &SettingFix) -> String {
        self.render(fix.setting.envoy, &fix.values)
    }

    /// Writes a fix into the sentence of its place, and replaces the names in braces.
    fn render(&self, fix: &str, values: &[(&'static str, String)]) -> String {
        let mut places = settings::PLACES.iter();
        let placed = places.find_map(|(place, sentence)| {
            let text = fix.strip_prefix(place)?;
            Some(sentence.replace("{text}", text))
        });
        let (routes, gateway, policy) = match &self.plane {
            ControlPlane::Istio(routes) => (describe_routes(routes), "", ""),
            ControlPlane::EnvoyGateway { gateway, policy } => {
                (String::new(), gateway.as_str(), policy.as_str())
            }
            ControlPlane::EnvoyAiGateway(gateway) => (String::new(), gateway.as_str(), ""),
            ControlPlane::Other => (String::new(), "", ""),
        };
        let port = self.expected.tcp.map_or(DEFAULT_PORT, |tcp| tcp.port());
        let names = [
            ("filter", self.main.name.clone()),
            ("listener", self.listener.name.clone()),
            ("routes", routes),
            ("gateway", gateway.to_owned()),
            ("policy", policy.to_owned()),
            ("port", port.to_string()),
        ];
        let values = names.iter().chain(values);
        let fix = placed.unwrap_or(fix.to_owned());
        values.fold(fix, |text, (name, value)| {
            text.replace(&format!("{{{name}}}"), value)
        })
    }
}

/// Returns the end of the phrase that names the routes of an EnvoyFilter.
fn describe_routes(routes: &[String]) -> String {
    match routes {
        [] => "`".to_owned(),
        [one] => format!("` that names the route `{one}`"),
        several => format!("` that names the routes `{}`", several.join("`, `")),
    }
}

/// Returns the fix that removes request headers early.
pub(super) fn client_headers_fix(names: &[&str]) -> SettingFix {
    let removals: Vec<String> = names
        .iter()
        .map(|name| format!("- remove: {name}"))
        .collect();
    settings::CLIENT_HEADERS
        .with("removals", removals.join("; "))
        .with("names", list(names))
}

/// Formats a duration as in Envoy's YAML.
pub(super) fn format_seconds(length: Duration) -> String {
    format!("{}s", length.as_secs_f64())
}
