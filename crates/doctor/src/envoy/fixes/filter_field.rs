//! Fields of the ext_proc filter, and the fields of control planes that set them.

use std::borrow::Cow;
use std::time::Duration;

use crate::envoy::filter::format_seconds;

/// Scope in which Envoy reads a field of the ext_proc filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldScope {
    /// The filter and the overrides of a route.
    Route,
    /// The filter only.
    Filter,
}

/// A field of the ext_proc filter with its value.
#[derive(Clone, Debug)]
pub(crate) struct FilterField<'a> {
    pub(super) scope: FieldScope,
    /// Text for Envoy's own configuration.
    pub(super) envoy: Cow<'a, str>,
    /// Field under `extProc` of an EnvoyExtensionPolicy; `None` if there is no such field.
    pub(super) policy: Option<Cow<'a, str>>,
    /// Annotation of the InferencePool for Envoy AI Gateway; `None` if there is no such annotation.
    pub(super) annotation: Option<&'a str>,
}

impl<'a> FilterField<'a> {
    const fn new(
        scope: FieldScope,
        envoy: &'a str,
        policy: Option<&'a str>,
        annotation: Option<&'a str>,
    ) -> Self {
        let policy = match policy {
            Some(text) => Some(Cow::Borrowed(text)),
            None => None,
        };
        Self {
            scope,
            envoy: Cow::Borrowed(envoy),
            policy,
            annotation,
        }
    }

    /// Returns `message_timeout` with this value.
    pub(crate) fn message_timeout(length: Duration) -> Self {
        let policy = format!("messageTimeout: {}ms", length.as_millis());
        let envoy = format!("`message_timeout: {}`", format_seconds(length));
        Self {
            scope: FieldScope::Filter,
            envoy: envoy.into(),
            policy: Some(policy.into()),
            annotation: None,
        }
    }

    /// Returns `max_message_timeout` with this value.
    pub(crate) fn max_message_timeout(length: Duration) -> Self {
        let envoy = format!("`max_message_timeout: {}`", format_seconds(length));
        Self {
            scope: FieldScope::Filter,
            envoy: envoy.into(),
            policy: None,
            annotation: None,
        }
    }

    /// Returns the field that lets Envoy accept metadata of a namespace.
    pub(crate) fn receiving(namespace: &str) -> Self {
        let envoy = format!(
            "`{namespace}` into `receiving_namespaces: {{untyped: [..]}}` under `metadata_options`"
        );
        let policy = format!("metadata: {{writableNamespaces: [{namespace}]}}");
        Self {
            scope: FieldScope::Route,
            envoy: envoy.into(),
            policy: Some(policy.into()),
            annotation: None,
        }
    }

    /// Returns the field that lets Envoy send metadata of a namespace.
    pub(crate) fn forwarding(namespace: &str) -> Self {
        let envoy = format!(
            "`{namespace}` into `forwarding_namespaces: {{untyped: [..]}}` under `metadata_options`"
        );
        let policy = format!("metadata: {{accessibleNamespaces: [{namespace}]}}");
        Self {
            scope: FieldScope::Route,
            envoy: envoy.into(),
            policy: Some(policy.into()),
            annotation: None,
        }
    }
}

const DUPLEX_REQUEST: Option<&str> = Some("processingMode: {request: {body: FullDuplexStreamed}}");
const DUPLEX_RESPONSE: Option<&str> =
    Some("processingMode: {response: {body: FullDuplexStreamed}}");
const DUPLEX_POOL: Option<&str> = Some("aigateway.envoyproxy.io/processing-body-mode: duplex");

pub(crate) const OBSERVABILITY: FilterField<'static> = FilterField::new(
    FieldScope::Filter,
    "`observability_mode: false`",
    None,
    None,
);
pub(crate) const REQUEST_HEADERS: FilterField<'static> = FilterField::new(
    FieldScope::Route,
    "`request_header_mode: SEND` under `processing_mode`",
    DUPLEX_REQUEST,
    None,
);
pub(crate) const REQUEST_BODY: FilterField<'static> = FilterField::new(
    FieldScope::Route,
    "`request_body_mode: BUFFERED` under `processing_mode` (or FULL_DUPLEX_STREAMED with \
    `request_trailer_mode: SEND`, \
     for bodies of any length)",
    DUPLEX_REQUEST,
    DUPLEX_POOL,
);
pub(crate) const REQUEST_TRAILERS: FilterField<'static> = FilterField::new(
    FieldScope::Route,
    "`request_trailer_mode: SEND` under `processing_mode`",
    None,
    None,
);
pub(crate) const CONTENT_LENGTH: FilterField<'static> = FilterField::new(
    FieldScope::Filter,
    "`allow_content_length_header: true`",
    None,
    None,
);
pub(crate) const RESPONSE_HEADERS: FilterField<'static> = FilterField::new(
    FieldScope::Route,
    "`response_header_mode: SEND` under `processing_mode`",
    DUPLEX_RESPONSE,
    None,
);
pub(crate) const RESPONSE_BODY: FilterField<'static> = FilterField::new(
    FieldScope::Route,
    "`response_body_mode: NONE` under `processing_mode`",
    DUPLEX_RESPONSE,
    DUPLEX_POOL,
);
pub(crate) const RESPONSE_TRAILERS: FilterField<'static> = FilterField::new(
    FieldScope::Route,
    "`response_trailer_mode: SEND` under `processing_mode`",
    DUPLEX_RESPONSE,
    DUPLEX_POOL,
);
pub(crate) const FAILURE_MODE: FilterField<'static> = FilterField::new(
    FieldScope::Route,
    "`failure_mode_allow: true`",
    Some("failOpen: true"),
    None,
);
pub(crate) const MODE_OVERRIDE: FilterField<'static> = FilterField::new(
    FieldScope::Filter,
    "`allow_mode_override: true`",
    Some("processingMode: {allowModeOverride: true}"),
    Some("aigateway.envoyproxy.io/allow-mode-override: \"true\""),
);
/// Response attributes. Envoy accepts attributes in the overrides of a route, but ignores them.
pub(crate) const RESPONSE_ATTRIBUTES: FilterField<'static> = FilterField::new(
    FieldScope::Filter,
    "`response_attributes: [upstream.address, response.flags]`",
    Some("processingMode: {response: {attributes: [upstream.address, response.flags]}}"),
    None,
);
