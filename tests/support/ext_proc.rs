//! Messages of Envoy to an external processor.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders, ProcessingRequest};

pub(crate) fn headers(pairs: &[(&str, &str)]) -> HttpHeaders {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = pairs.iter().map(header).collect();
    HttpHeaders {
        headers: Some(HeaderMap { headers }),
        ..HttpHeaders::default()
    }
}

pub(crate) fn body(bytes: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody {
        body: bytes.to_vec(),
        end_of_stream,
        ..HttpBody::default()
    }
}

pub(crate) fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest {
        request: Some(request),
        ..ProcessingRequest::default()
    }
}

/// Returns the messages of a POST with a JSON body.
pub(crate) fn post(path: &str, more: &[(&str, &str)], json: &str) -> [ProcessingRequest; 2] {
    let head = [
        (":method", "POST"),
        (":path", path),
        ("content-type", "application/json"),
    ];
    [
        message(Request::RequestHeaders(headers(&[&head, more].concat()))),
        message(Request::RequestBody(body(json.as_bytes(), true))),
    ]
}
