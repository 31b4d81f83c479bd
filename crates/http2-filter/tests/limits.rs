//! Header blocks that exceed the limit of the filter.

use std::io;

use tokio::io::AsyncReadExt as _;
use warmroute_http2_filter::{Http2Filter, Http2Limits};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const LIMIT: usize = 1000;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

/// Returns the octets that pass the filter, and the result of reading.
async fn passed(frames: &[Vec<u8>]) -> (Vec<u8>, io::Result<usize>) {
    let input = [PREFACE, &frames.concat()].concat();
    let mut filter = Http2Filter::new(
        &*input,
        Http2Limits {
            max_header_block_bytes: LIMIT,
        },
        |_| {},
    );
    let mut octets = Vec::new();
    let ended = filter.read_to_end(&mut octets).await;
    (octets, ended)
}

#[tokio::test]
async fn oversized_header_block_ends_the_connection() {
    let next = frame(0, 0, b"next");
    let blocks = [
        vec![frame(HEADERS, END_HEADERS, &[0x88; LIMIT])],
        vec![
            frame(HEADERS, 0, &[0x88; LIMIT / 2]),
            frame(CONTINUATION, END_HEADERS, &[0x88; LIMIT / 2]),
        ],
        [
            vec![frame(HEADERS, 0, &[])],
            vec![frame(CONTINUATION, 0, &[]); 200],
        ]
        .concat(),
    ];
    for block in blocks {
        let expected = [PREFACE, &block[0]].concat();
        let (octets, ended) = passed(&[block, vec![next.clone()]].concat()).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(
            octets, expected,
            "h2 still receives the frame, which it may refuse"
        );
    }
    let largest = [frame(HEADERS, END_HEADERS, &[0x88; LIMIT - 9]), next];
    let (octets, ended) = passed(&largest).await;
    ended.unwrap();
    assert_eq!(octets, [PREFACE, &largest.concat()].concat());
}
