//! Conversion between the JSON of transcripts and the wire messages of Envoy.

use std::collections::HashMap;
use std::fmt::Debug;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{
    HeaderMap, HeaderValue, HeaderValueOption, Metadata,
};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::{
    BodySendMode, HeaderSendMode,
};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HeaderMutation, HttpBody, HttpHeaders, HttpTrailers, ImmediateResponse,
    ProcessingRequest, ProcessingResponse, ProtocolConfiguration, TrailersResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{ListValue, Struct, Value as ProtoValue};
use serde_json::{Map, Value, json};

/// Parses bytes, which are written as a text, JSON that is meant as text, hexadecimal digits, a
/// repeated piece, or a list of parts.
pub(crate) fn bytes(written: &Value) -> Vec<u8> {
    match written {
        Value::String(text) => text.clone().into_bytes(),
        Value::Array(parts) => parts.iter().flat_map(bytes).collect(),
        Value::Object(fields) => {
            if let (Some(piece), Some(times)) = (fields.get("repeat"), fields.get("times")) {
                return bytes(piece).repeat(times.as_u64().unwrap() as usize);
            }
            let digits = fields
                .get("hex")
                .and_then(Value::as_str)
                .unwrap_or_else(|| panic!("unknown form of bytes: {written}"));
            let digits: Vec<u8> = digits.bytes().filter(|digit| *digit != b' ').collect();
            digits
                .chunks(2)
                .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
                .collect()
        }
        _ => panic!("unknown form of bytes: {written}"),
    }
}

/// Returns bytes in the canonical form for comparison.
pub(crate) fn canonical_bytes(bytes: &[u8]) -> Value {
    match str::from_utf8(bytes) {
        Ok(text) => Value::String(text.to_owned()),
        Err(_) => {
            json!({ "hex": bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>() })
        }
    }
}

/// Parses a message to the server.
pub(crate) fn request(written: &Value) -> ProcessingRequest {
    let mut wire = ProcessingRequest::default();
    for (key, value) in written.as_object().unwrap() {
        match key.as_str() {
            "metadata" => {
                let filter_metadata = value
                    .as_object()
                    .unwrap()
                    .iter()
                    .map(|(key, value)| (key.clone(), fields(value)));
                wire.metadata_context = Some(Metadata {
                    filter_metadata: filter_metadata.collect(),
                    ..Metadata::default()
                });
            }
            "attributes" => {
                wire.attributes =
                    HashMap::from([("envoy.filters.http.ext_proc".to_owned(), fields(value))])
            }
            "protocol_config" => {
                let mode = |key: &str| {
                    let name = value[key].as_str().unwrap_or("NONE");
                    BodySendMode::from_str_name(name)
                        .unwrap_or_else(|| panic!("unknown body mode: {name}"))
                        .into()
                };
                wire.protocol_config = Some(ProtocolConfiguration {
                    request_body_mode: mode("request_body_mode"),
                    response_body_mode: mode("response_body_mode"),
                    ..ProtocolConfiguration::default()
                });
            }
            _ => wire.request = Some(message(key, value)),
        }
    }
    wire
}

fn message(key: &str, value: &Value) -> Request {
    let known = match key {
        "request_headers" | "response_headers" => &["headers", "end_of_stream"][..],
        "request_body" | "response_body" => &["body", "end_of_stream"],
        _ => &["trailers"],
    };
    let surplus = value
        .as_object()
        .unwrap()
        .keys()
        .find(|field| !known.contains(&field.as_str()));
    assert_eq!(surplus, None, "unknown field of {key}");
    let end_of_stream = value["end_of_stream"].as_bool().unwrap_or(false);
    let headers = || HttpHeaders {
        headers: Some(header_map(&value["headers"])),
        end_of_stream,
        ..Default::default()
    };
    let body = || HttpBody {
        body: bytes(&value["body"]),
        end_of_stream,
        ..Default::default()
    };
    let trailers = || HttpTrailers {
        trailers: Some(header_map(&value["trailers"])),
    };
    match key {
        "request_headers" => Request::RequestHeaders(headers()),
        "request_body" => Request::RequestBody(body()),
        "request_trailers" => Request::RequestTrailers(trailers()),
        "response_headers" => Request::ResponseHeaders(headers()),
        "response_body" => Request::ResponseBody(body()),
        "response_trailers" => Request::ResponseTrailers(trailers()),
        _ => panic!("unknown message {key}"),
    }
}

/// Parses headers. A string is a `raw_value`, as Envoy sends it. `{"value": ..}` is the older
/// field. A list is several headers with one name.
fn header_map(written: &Value) -> HeaderMap {
    let header = |key: &str, value: &Value| match value {
        Value::Object(fields) => {
            let get = |name: &str| {
                fields
                    .get(name)
                    .map_or("", |value| value.as_str().unwrap())
                    .to_owned()
            };
            HeaderValue {
                key: key.to_owned(),
                value: get("value"),
                raw_value: get("raw_value").into_bytes(),
            }
        }
        text => HeaderValue {
            key: key.to_owned(),
            raw_value: bytes(text),
            ..HeaderValue::default()
        },
    };
    let headers = written
        .as_object()
        .into_iter()
        .flatten()
        .flat_map(|(key, value)| match value {
            Value::Array(values) => values.iter().map(|value| header(key, value)).collect(),
            value => vec![header(key, value)],
        });
    HeaderMap {
        headers: headers.collect(),
    }
}

fn fields(value: &Value) -> Struct {
    Struct {
        fields: value
            .as_object()
            .unwrap()
            .iter()
            .map(|(key, value)| (key.clone(), proto(value)))
            .collect(),
    }
}

fn proto(value: &Value) -> ProtoValue {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(value) => Kind::NumberValue(value.as_f64().unwrap()),
        Value::String(value) => Kind::StringValue(value.clone()),
        Value::Array(values) => Kind::ListValue(ListValue {
            values: values.iter().map(proto).collect(),
        }),
        Value::Object(_) => Kind::StructValue(fields(value)),
    };
    ProtoValue { kind: Some(kind) }
}

fn json_of(value: &ProtoValue) -> Value {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(value)) => json!(value),
        Some(Kind::NumberValue(value)) => json!(value),
        Some(Kind::StringValue(value)) => json!(value),
        Some(Kind::ListValue(list)) => list.values.iter().map(json_of).collect(),
        Some(Kind::StructValue(fields)) => json_of_struct(fields),
    }
}

fn json_of_struct(fields: &Struct) -> Value {
    fields
        .fields
        .iter()
        .map(|(key, value)| (key.clone(), json_of(value)))
        .collect::<Map<_, _>>()
        .into()
}

/// Converts a reply of the server. Fields that have no conversion are added in debug format, so
/// that nothing is ignored.
pub(crate) fn reply(mut wire: ProcessingResponse) -> Value {
    let mut shown = Map::new();
    if let Some(response) = wire.response.take() {
        let (name, value) = message_of(response);
        shown.insert(name.to_owned(), value);
    }
    if let Some(metadata) = wire.dynamic_metadata.take() {
        shown.insert("dynamic_metadata".to_owned(), json_of_struct(&metadata));
    }
    if let Some(mode) = wire.mode_override.take() {
        shown.insert("mode_override".to_owned(), mode_of(mode));
    }
    if let Some(wait) = wire.override_message_timeout.take() {
        let millis = wait.seconds * 1000 + i64::from(wait.nanos) / 1_000_000;
        shown.insert(
            "override_message_timeout".to_owned(),
            json!(format!("{millis}ms")),
        );
    }
    with_unconverted(&wire, &mut shown)
}

/// Adds the fields of a message that were not converted, and returns the result.
fn with_unconverted<M: Default + PartialEq + Debug>(
    rest: &M,
    shown: &mut Map<String, Value>,
) -> Value {
    if *rest != M::default() {
        shown.insert("left_over".to_owned(), json!(format!("{rest:?}")));
    }
    std::mem::take(shown).into()
}

fn message_of(response: Response) -> (&'static str, Value) {
    match response {
        Response::RequestHeaders(reply) => (
            "request_headers",
            reply.response.map_or(Value::Null, common),
        ),
        Response::ResponseHeaders(reply) => (
            "response_headers",
            reply.response.map_or(Value::Null, common),
        ),
        Response::RequestBody(reply) => {
            ("request_body", reply.response.map_or(Value::Null, common))
        }
        Response::ResponseBody(reply) => {
            ("response_body", reply.response.map_or(Value::Null, common))
        }
        Response::RequestTrailers(reply) => ("request_trailers", trailers(reply)),
        Response::ResponseTrailers(reply) => ("response_trailers", trailers(reply)),
        Response::ImmediateResponse(reply) => ("immediate_response", immediate(reply)),
        other => ("unknown", json!(format!("{other:?}"))),
    }
}

fn common(mut reply: CommonResponse) -> Value {
    let mut shown = Map::new();
    if std::mem::take(&mut reply.clear_route_cache) {
        shown.insert("clear_route_cache".to_owned(), json!(true));
    }
    reply
        .header_mutation
        .take()
        .into_iter()
        .for_each(|mutation| headers(mutation, &mut shown));
    match reply.body_mutation.take().and_then(|body| body.mutation) {
        Some(Mutation::Body(body)) => drop(shown.insert("body".to_owned(), canonical_bytes(&body))),
        Some(Mutation::ClearBody(clear)) => {
            drop(shown.insert("clear_body".to_owned(), json!(clear)))
        }
        Some(Mutation::StreamedResponse(mut piece)) => {
            let mut fields = Map::new();
            fields.insert(
                "body".to_owned(),
                canonical_bytes(&std::mem::take(&mut piece.body)),
            );
            fields.insert(
                "end_of_stream".to_owned(),
                json!(std::mem::take(&mut piece.end_of_stream)),
            );
            shown.insert(
                "streamed_response".to_owned(),
                with_unconverted(&piece, &mut fields),
            );
        }
        None => {}
    }
    with_unconverted(&reply, &mut shown)
}

fn trailers(mut reply: TrailersResponse) -> Value {
    let mut shown = Map::new();
    reply
        .header_mutation
        .take()
        .into_iter()
        .for_each(|mutation| headers(mutation, &mut shown));
    with_unconverted(&reply, &mut shown)
}

/// Converts an immediate response. `details` appears in Envoy's logs.
fn immediate(mut reply: ImmediateResponse) -> Value {
    let mut shown = Map::new();
    shown.insert(
        "status".to_owned(),
        json!(reply.status.take().map_or(0, |status| status.code)),
    );
    reply
        .headers
        .take()
        .into_iter()
        .for_each(|mutation| headers(mutation, &mut shown));
    let body = std::mem::take(&mut reply.body);
    let json = shown["set_headers"]["content-type"] == "application/json";
    let text = || canonical_bytes(&body);
    let body = if json {
        serde_json::from_slice(&body).unwrap_or_else(|_| text())
    } else {
        text()
    };
    shown.insert("body".to_owned(), body);
    shown.insert(
        "details".to_owned(),
        json!(std::mem::take(&mut reply.details)),
    );
    with_unconverted(&reply, &mut shown)
}

/// Converts headers to a map by name, because their order has no meaning. Several headers with one
/// name become a list.
fn headers(mutation: HeaderMutation, shown: &mut Map<String, Value>) {
    let mut set = Map::new();
    for mut option in mutation.set_headers {
        let header = option.header.take().unwrap_or_default();
        let overwrites =
            option.append_action == i32::from(HeaderAppendAction::OverwriteIfExistsOrAdd);
        option.append_action = 0;
        let mut value = canonical_bytes(&header.raw_value);
        if !overwrites || !header.value.is_empty() || option != HeaderValueOption::default() {
            value = json!(format!("{option:?} {header:?}, overwrites: {overwrites}"));
        }
        match set.get_mut(&header.key) {
            Some(Value::Array(values)) => values.push(value),
            Some(other) => *other = json!([other.clone(), value]),
            None => drop(set.insert(header.key, value)),
        }
    }
    if !set.is_empty() {
        shown.insert("set_headers".to_owned(), set.into());
    }
    let mut removed = mutation.remove_headers;
    removed.sort_unstable();
    if !removed.is_empty() {
        shown.insert("remove_headers".to_owned(), json!(removed));
    }
}

fn mode_of(mut mode: ProcessingMode) -> Value {
    let mut shown = Map::new();
    let mut take = |name: &str, field: &mut i32, header: bool| {
        let number = std::mem::take(field);
        let text = match header {
            true => HeaderSendMode::try_from(number).map(|mode| mode.as_str_name()),
            false => BodySendMode::try_from(number).map(|mode| mode.as_str_name()),
        };
        shown.insert(name.to_owned(), json!(text.unwrap()));
    };
    take("request_header_mode", &mut mode.request_header_mode, true);
    take("response_header_mode", &mut mode.response_header_mode, true);
    take("request_body_mode", &mut mode.request_body_mode, false);
    take("response_body_mode", &mut mode.response_body_mode, false);
    take("request_trailer_mode", &mut mode.request_trailer_mode, true);
    take(
        "response_trailer_mode",
        &mut mode.response_trailer_mode,
        true,
    );
    with_unconverted(&mode, &mut shown)
}

/// Returns the body bytes in a reply, and true if they belong to the request.
pub(crate) fn returned(wire: &ProcessingResponse) -> Option<(bool, &[u8])> {
    let (request, common) = match wire.response.as_ref()? {
        Response::RequestBody(body) => (true, body.response.as_ref()?),
        Response::ResponseBody(body) => (false, body.response.as_ref()?),
        _ => return None,
    };
    match common.body_mutation.as_ref()?.mutation.as_ref()? {
        Mutation::StreamedResponse(piece) => Some((request, &piece.body)),
        Mutation::Body(body) => Some((request, body)),
        Mutation::ClearBody(_) => None,
    }
}
