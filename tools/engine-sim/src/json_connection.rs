//! Connection between two simulated engines: JSON over TCP, one value per line.

use std::io;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Formats host and port; an IPv6 address may have brackets or not.
pub(crate) fn host_port(host: &str, port: u16) -> String {
    let bare_host = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(host);
    if bare_host.contains(':') {
        format!("[{bare_host}]:{port}")
    } else {
        format!("{bare_host}:{port}")
    }
}

#[derive(Debug)]
pub(crate) struct JsonConnection {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    /// Bytes of an incomplete line, so that a read can be cancelled and resumed.
    partial_line: Vec<u8>,
}

impl JsonConnection {
    pub(crate) fn new(stream: TcpStream) -> Self {
        // Avoids the delay of small replies by Nagle's algorithm. A failure is harmless.
        stream.set_nodelay(true).ok();
        let (reader, writer) = stream.into_split();
        Self {
            reader: BufReader::new(reader),
            writer,
            partial_line: Vec::new(),
        }
    }

    pub(crate) async fn connect(address: &str) -> io::Result<Self> {
        Ok(Self::new(TcpStream::connect(address).await?))
    }

    pub(crate) async fn send(&mut self, value: &Value) -> io::Result<()> {
        self.writer.write_all(format!("{value}\n").as_bytes()).await
    }

    /// Sends a value and returns the reply.
    pub(crate) async fn call(&mut self, value: &Value) -> io::Result<Value> {
        self.send(value).await?;
        let reply = self.receive().await?;
        match reply["error"].as_str() {
            Some(error) => Err(io::Error::other(error.to_owned())),
            None => Ok(reply),
        }
    }

    /// Receives the next value. Fails if the peer disconnects.
    pub(crate) async fn receive(&mut self) -> io::Result<Value> {
        self.reader
            .read_until(b'\n', &mut self.partial_line)
            .await?;
        let line = std::mem::take(&mut self.partial_line);
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
    fn ipv6_addresses_work_with_and_without_brackets() {
        for (host, expected) in [
            ("p-0", "p-0:8998"),
            ("10.0.0.1", "10.0.0.1:8998"),
            ("::1", "[::1]:8998"),
            ("[fd00::2]", "[fd00::2]:8998"),
        ] {
            assert_eq!(host_port(host, 8998), expected);
        }
    }
}
