//! What simulators say to one another: JSON, one value per line, over TCP.

use std::io;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Host and port as one; an IPv6 address may come with or without its brackets.
pub(crate) fn address(host: &str, port: u16) -> String {
    let bare = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(host);
    if bare.contains(':') {
        format!("[{bare}]:{port}")
    } else {
        format!("{bare}:{port}")
    }
}

#[derive(Debug)]
pub(crate) struct Line {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    /// What has come of a line that is not complete yet, so that waiting for it can be given up and taken up again.
    begun: Vec<u8>,
}

impl Line {
    pub(crate) fn new(stream: TcpStream) -> Self {
        // Without it small answers wait for the other side's acknowledgement; only slower when it fails.
        stream.set_nodelay(true).ok();
        let (reader, writer) = stream.into_split();
        Self {
            reader: BufReader::new(reader),
            writer,
            begun: Vec::new(),
        }
    }

    pub(crate) async fn connect(address: &str) -> io::Result<Self> {
        Ok(Self::new(TcpStream::connect(address).await?))
    }

    pub(crate) async fn say(&mut self, value: &Value) -> io::Result<()> {
        self.writer.write_all(format!("{value}\n").as_bytes()).await
    }

    /// Says this; what the other side says to it.
    pub(crate) async fn ask(&mut self, value: &Value) -> io::Result<Value> {
        self.say(value).await?;
        let answer = self.hear().await?;
        match answer["error"].as_str() {
            Some(error) => Err(io::Error::other(error.to_owned())),
            None => Ok(answer),
        }
    }

    /// What the other side says next; an error also when it left.
    pub(crate) async fn hear(&mut self) -> io::Result<Value> {
        self.reader.read_until(b'\n', &mut self.begun).await?;
        let line = std::mem::take(&mut self.begun);
        if line.last() != Some(&b'\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        serde_json::from_slice(&line).map_err(io::Error::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_ip_version_6_may_have_their_brackets_or_not() {
        for (host, expected) in [
            ("p-0", "p-0:8998"),
            ("10.0.0.1", "10.0.0.1:8998"),
            ("::1", "[::1]:8998"),
            ("[fd00::2]", "[fd00::2]:8998"),
        ] {
            assert_eq!(address(host, 8998), expected);
        }
    }
}
