//! Clients that control how a request is uploaded: a hand-written one for HTTP/1.1, and one for
//! HTTP/2.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use reqwest::header::{HeaderMap, HeaderValue};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::mpsc;
use warmroute_testbed::ports::PATIENCE;

use crate::support::deployment::RoutedAnswer;

/// Framing and pacing of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UploadRequest {
    /// Sends a `content-length` header.
    pub(crate) sized: bool,
    /// Sends trailers after the body.
    pub(crate) trailers: bool,
    /// Sends `expect: 100-continue` and waits for the reply.
    pub(crate) expect: bool,
    /// Bytes per chunk.
    pub(crate) piece: usize,
    /// Pause between two chunks.
    pub(crate) pause: Duration,
}

impl UploadRequest {
    pub(crate) const SIZED: Self = Self {
        sized: true,
        trailers: false,
        expect: false,
        piece: 60_000,
        pause: Duration::ZERO,
    };
    pub(crate) const CHUNKED: Self = Self {
        sized: false,
        ..Self::SIZED
    };
}

/// HTTP/1.1 client with its own connection.
pub(crate) struct Http1Client {
    pub(crate) stream: TcpStream,
}

impl Http1Client {
    /// Connects and sends the request head.
    pub(crate) async fn begin(port: u16, headers: &str) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let mut client = Self { stream };
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n\
             connection: close\r\n{headers}\r\n"
        );
        client.stream.write_all(head.as_bytes()).await.unwrap();
        client
    }

    /// Sends one chunk of a chunked body.
    pub(crate) async fn chunk(&mut self, bytes: &[u8]) {
        let framed = [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
        self.stream.write_all(&framed).await.unwrap();
    }

    /// Ends a chunked body and reads the response.
    pub(crate) async fn end(mut self) -> RoutedAnswer {
        self.stream.write_all(b"0\r\n\r\n").await.unwrap();
        let (mut reading, _writing) = self.stream.into_split();
        read(&mut reading, Vec::new()).await
    }
}

fn checked() -> HeaderMap {
    HeaderMap::from_iter([(
        "x-checked".parse().unwrap(),
        HeaderValue::from_static("yes"),
    )])
}

/// Sends a request with HTTP/1.1. Panics if the response takes too long.
pub(crate) async fn http1(port: u16, body: &[u8], upload: UploadRequest) -> RoutedAnswer {
    let mut headers = match upload.sized {
        true => format!("content-length: {}\r\n", body.len()),
        false => "transfer-encoding: chunked\r\n".to_owned(),
    };
    if upload.expect {
        headers += "expect: 100-continue\r\n";
    }
    if upload.trailers {
        headers += "trailer: x-checked\r\n";
    }
    let (mut reading, mut writing) = Http1Client::begin(port, &headers).await.stream.into_split();
    if upload.expect {
        let mut seen = Vec::new();
        while !seen.ends_with(b"\r\n\r\n") {
            let byte = tokio::time::timeout(PATIENCE, reading.read_u8())
                .await
                .expect("no 100 Continue");
            seen.push(byte.unwrap());
        }
        assert!(
            seen.starts_with(b"HTTP/1.1 100"),
            "{}",
            String::from_utf8_lossy(&seen)
        );
    }
    let write = async {
        for piece in body.chunks(upload.piece) {
            let chunk = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
            writing
                .write_all(if upload.sized { piece } else { &chunk })
                .await?;
            if !upload.pause.is_zero() {
                tokio::time::sleep(upload.pause).await;
            }
        }
        match (upload.sized, upload.trailers) {
            (true, _) => Ok(()),
            (false, true) => writing.write_all(b"0\r\nx-checked: yes\r\n\r\n").await,
            (false, false) => writing.write_all(b"0\r\n\r\n").await,
        }
    };
    // If the response precedes the end of the body, Envoy does not read the rest of the body.
    let (_, got) = tokio::join!(write, read(&mut reading, Vec::new()));
    got
}

async fn read(reading: &mut OwnedReadHalf, mut raw: Vec<u8>) -> RoutedAnswer {
    // A connection is reset after the whole response, or without a response.
    let read = tokio::time::timeout(PATIENCE, reading.read_to_end(&mut raw)).await;
    assert!(
        read.is_ok(),
        "the response does not end: {}",
        String::from_utf8_lossy(&raw)
    );
    parse(&raw)
}

fn parse(raw: &[u8]) -> RoutedAnswer {
    let text = String::from_utf8_lossy(raw);
    let Some(at) = raw.windows(4).position(|four| four == b"\r\n\r\n") else {
        panic!("no response: {text:?}")
    };
    let head = String::from_utf8_lossy(&raw[..at]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap();
    let pair = |line: &str| {
        let (key, value) = line.split_once(": ")?;
        Some((key.parse().unwrap(), value.parse().unwrap()))
    };
    let headers: HeaderMap = lines.filter_map(pair).collect();
    let (body, is_whole) = body_of(&headers, &raw[at + 4..]);
    RoutedAnswer::from_parts(status.parse().unwrap(), headers, &body, !is_whole)
}

/// Returns the body of a response, and true if it is complete.
fn body_of(headers: &HeaderMap, mut rest: &[u8]) -> (Vec<u8>, bool) {
    if let Some(length) = headers.get("content-length") {
        let length = length.to_str().unwrap().parse::<usize>();
        return (rest.to_vec(), length == Ok(rest.len()));
    }
    let mut body = Vec::new();
    let mut is_whole = false;
    while let Some(end) = rest.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        let Some(data) = rest[end + 2..].get(..size) else {
            break;
        };
        is_whole = size == 0;
        body.extend_from_slice(data);
        rest = rest.get(end + 4 + size..).unwrap_or_default();
    }
    (body, is_whole)
}

/// HTTP/2 body that is sent in chunks.
struct BodyPieces {
    frames: mpsc::Receiver<Frame<Bytes>>,
    length: Option<u64>,
}

impl http_body::Body for BodyPieces {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        self.frames.poll_recv(context).map(|frame| frame.map(Ok))
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.length.map_or_else(
            http_body::SizeHint::default,
            http_body::SizeHint::with_exact,
        )
    }
}

fn pieces(body: &[u8], upload: UploadRequest) -> reqwest::Body {
    let (send, frames) = mpsc::channel(16);
    let length = upload.sized.then_some(body.len() as u64);
    let body = Bytes::copy_from_slice(body);
    tokio::spawn(async move {
        for at in (0..body.len()).step_by(upload.piece) {
            let piece = body.slice(at..body.len().min(at + upload.piece));
            if send.send(Frame::data(piece)).await.is_err() {
                return;
            }
            if !upload.pause.is_zero() {
                tokio::time::sleep(upload.pause).await;
            }
        }
        if upload.trailers {
            _ = send.send(Frame::trailers(checked())).await;
        }
    });
    reqwest::Body::wrap(BodyPieces { frames, length })
}

/// Sends a request with HTTP/2.
pub(crate) async fn http2(port: u16, body: &[u8], upload: UploadRequest) -> RoutedAnswer {
    post2(port, upload.expect, pieces(body, upload)).await
}

async fn post2(port: u16, expect: bool, body: reqwest::Body) -> RoutedAnswer {
    let client = warmroute_runtime::tls::http_client_builder()
        .timeout(PATIENCE)
        .http2_prior_knowledge()
        .build()
        .unwrap();
    let mut request = client.post(format!("http://127.0.0.1:{port}/v1/chat/completions"));
    request = request.header("content-type", "application/json");
    if expect {
        request = request.header("expect", "100-continue");
    }
    let response = request.body(body).send().await.unwrap();
    assert_eq!(response.version(), reqwest::Version::HTTP_2);
    RoutedAnswer::read(response).await
}
