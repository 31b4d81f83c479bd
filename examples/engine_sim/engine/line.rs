//! What simulators say to one another: JSON, one value per line, over TCP.

use std::io;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

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
        Self { reader: BufReader::new(reader), writer, begun: Vec::new() }
    }

    pub(crate) async fn connect(address: &str) -> io::Result<Self> {
        Ok(Self::new(TcpStream::connect(address).await?))
    }

    pub(crate) async fn say(&mut self, value: &Value) -> io::Result<()> {
        self.writer.write_all(format!("{value}\n").as_bytes()).await
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
