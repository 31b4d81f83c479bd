//! Compression of large admin pages: with hundreds of workers, the metrics page has megabytes.

use std::io::Write as _;

use axum::body::{Body, HttpBody as _, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use flate2::Compression;
use flate2::write::GzEncoder;

/// Minimum size in bytes of a page that is compressed.
const MIN_SIZE: u64 = 16 * 1024;

/// Compresses a large page if the client accepts gzip.
pub(super) async fn compress_large_page(request: Request, next: Next) -> Response {
    let accepts = accepts_gzip(request.headers());
    let response = next.run(request).await;
    let size = response.body().size_hint().exact();
    if !accepts || size.is_none_or(|size| size < MIN_SIZE) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let Ok(page) = to_bytes(body, usize::MAX).await else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let Ok(compressed) = gzip(&page) else {
        return Response::from_parts(parts, Body::from(page));
    };
    let headers = &mut parts.headers;
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    headers.append(header::VARY, HeaderValue::from_static("accept-encoding"));
    Response::from_parts(parts, Body::from(compressed))
}

fn gzip(page: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(page)?;
    encoder.finish()
}

/// Returns whether the client accepts gzip. A quality of 0 means that it does not.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).iter();
    let codings = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    codings.map(str::trim).any(|coding| {
        let (name, quality) = coding.split_once(';').unwrap_or((coding, ""));
        let quality = quality.trim().strip_prefix("q=").map(str::parse::<f32>);
        name.trim().eq_ignore_ascii_case("gzip") && quality != Some(Ok(0.0))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use axum::Router;
    use axum::routing::get;
    use flate2::read::GzDecoder;
    use tonic::codegen::Service as _;

    use super::*;

    async fn fetch(path: &str, accept: &str) -> (HeaderMap, Vec<u8>) {
        let mut routes = Router::new()
            .route("/large", get(|| async { "warmroute ".repeat(10_000) }))
            .route("/small", get(|| async { "ok" }))
            .layer(axum::middleware::from_fn(compress_large_page));
        let request = Request::get(path)
            .header(header::ACCEPT_ENCODING, accept)
            .body(Body::empty())
            .unwrap();
        let (parts, body) = routes.call(request).await.unwrap().into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        (parts.headers, body.to_vec())
    }

    #[tokio::test]
    async fn large_page_is_compressed_if_accepted() {
        let page = "warmroute ".repeat(10_000);
        let (headers, body) = fetch("/large", "deflate, gzip;q=0.5").await;
        assert_eq!(headers[header::CONTENT_ENCODING], "gzip");
        assert!(body.len() < page.len() / 10, "{}", body.len());
        let mut text = String::new();
        GzDecoder::new(body.as_slice())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, page);
        for (path, accept) in [
            ("/large", "identity"),
            ("/large", "gzip;q=0"),
            ("/small", "gzip"),
        ] {
            let (headers, _) = fetch(path, accept).await;
            assert!(
                !headers.contains_key(header::CONTENT_ENCODING),
                "{path} {accept}"
            );
        }
    }
}
