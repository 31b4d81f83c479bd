//! Reads recorded traces, which contain lengths and block ids instead of text.
//!
//! A trace of coding agents has sessions whose prompts grow from request to request. A session is
//! one line with its name and the lengths of its tool definitions and system prompt, followed by
//! one line per request. A request keeps the first blocks of the previous prompt and appends runs
//! of new ones.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::Path;

use anyhow::{Context as _, Result};
use flate2::read::GzDecoder;
use serde::Deserialize;

/// Tokens per block of a trace.
pub const BLOCK_TOKENS: usize = 64;

/// First bytes of a gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// First line of a session.
#[derive(Clone, Debug, Deserialize)]
pub struct SessionHeader {
    /// Name of the session.
    pub session: String,
    /// Tokens of the tool definitions.
    pub tool: u64,
    /// Tokens of the system prompt.
    pub system: u64,
    /// Distinct blocks of the session.
    pub blocks: u32,
}

impl SessionHeader {
    /// Returns the number of blocks that the session shares with other sessions whose tool
    /// definitions and system prompts have the same lengths.
    pub fn common_blocks(&self) -> u64 {
        (self.tool + self.system) / BLOCK_TOKENS as u64
    }
}

/// Request of a session.
#[derive(Clone, Debug, Deserialize)]
pub struct RecordedRequest {
    /// Seconds between the previous answer and this request.
    pub think: f64,
    /// Tokens of the prompt.
    #[serde(rename = "in")]
    pub input: usize,
    /// Tokens of the answer.
    #[serde(rename = "out")]
    pub output: usize,
    /// Leading blocks of the previous prompt that this prompt keeps.
    pub keep: usize,
    /// Runs of appended blocks: first id and number.
    pub new: Vec<[u32; 2]>,
}

/// One recorded session.
#[derive(Clone, Debug)]
pub struct RecordedSession {
    /// Its name and lengths.
    pub header: SessionHeader,
    /// Its requests, in order.
    pub requests: Vec<RecordedRequest>,
}

impl RecordedSession {
    /// Calls `on_request` with each request and the block ids of its prompt, until it returns false.
    /// Ids count from 0 within the session.
    pub fn for_each_request(&self, mut on_request: impl FnMut(&RecordedRequest, &[u32]) -> bool) {
        let mut blocks: Vec<u32> = Vec::new();
        for request in &self.requests {
            blocks.truncate(request.keep);
            let runs = request.new.iter();
            blocks.extend(runs.flat_map(|&[first, count]| first..first + count));
            if !on_request(request, &blocks) {
                return;
            }
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TraceLine {
    Header(SessionHeader),
    Request(RecordedRequest),
}

/// Parses the lines of a trace of coding agents.
pub fn parse_sessions(lines: &[String]) -> Result<Vec<RecordedSession>> {
    let mut sessions: Vec<RecordedSession> = Vec::new();
    for line in lines {
        let line = serde_json::from_str(line).context("invalid line of a session trace")?;
        match line {
            TraceLine::Header(header) => sessions.push(RecordedSession {
                header,
                requests: Vec::new(),
            }),
            TraceLine::Request(request) => sessions
                .last_mut()
                .context("a request precedes the first session")?
                .requests
                .push(request),
        }
    }
    Ok(sessions)
}

/// Reads all lines of a plain or compressed file.
pub fn read_lines(path: &Path) -> Result<Vec<String>> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let mut magic = Vec::new();
    (&mut file)
        .take(GZIP_MAGIC.len() as u64)
        .read_to_end(&mut magic)?;
    file.rewind()?;
    let reader: Box<dyn Read> = if magic == GZIP_MAGIC {
        Box::new(GzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let lines: std::io::Result<Vec<String>> = BufReader::new(reader).lines().collect();
    lines.with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const TRACE: &str = r#"{"session":"a","tool":64,"system":70,"requests":2,"blocks":8}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":200,"out":5,"keep":0,"new":[[0,3]]}
{"a":0,"t":9.0,"think":5.0,"api":1.0,"in":320,"out":7,"keep":2,"new":[[3,2],[6,1]]}
"#;

    #[test]
    fn prompts_follow_kept_and_new_blocks() {
        let lines: Vec<String> = TRACE.lines().map(str::to_owned).collect();
        let sessions = parse_sessions(&lines).unwrap();
        assert_eq!(sessions[0].header.common_blocks(), 2);
        let mut prompts = Vec::new();
        sessions[0].for_each_request(|request, blocks| {
            prompts.push((request.input, blocks.to_vec()));
            true
        });
        assert_eq!(prompts, [(200, vec![0, 1, 2]), (320, vec![0, 1, 3, 4, 6])]);
    }

    #[test]
    fn request_before_first_session_is_an_error() {
        let line = TRACE.lines().nth(1).unwrap().to_owned();
        assert!(parse_sessions(&[line]).is_err());
    }

    #[test]
    fn compressed_and_plain_files_are_equal() {
        let directory = tempfile::tempdir().unwrap();
        let plain = directory.path().join("plain.jsonl");
        std::fs::write(&plain, TRACE).unwrap();
        let compressed = directory.path().join("compressed");
        let file = File::create(&compressed).unwrap();
        let mut encoder = GzEncoder::new(file, Compression::fast());
        encoder.write_all(TRACE.as_bytes()).unwrap();
        encoder.finish().unwrap();
        assert_eq!(
            read_lines(&plain).unwrap(),
            read_lines(&compressed).unwrap()
        );
    }
}
