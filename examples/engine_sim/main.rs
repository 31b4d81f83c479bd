//! The engine simulator as a process: `cargo run --example engine_sim -- --tokenizer
//! examples/models/qwen2.5/tokenizer.json.gz --listen 127.0.0.1:8000`.

mod engine;

use std::net::SocketAddr;

use anyhow::Context as _;
use clap::Parser;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    engine: engine::EngineConfig,
    /// Where HTTP is served; port 0 takes any.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// End when standard input does, so that no engine outlives the test that started it.
    #[arg(long)]
    exit_on_stdin_eof: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .init();
    let cli = Cli::parse();
    let listener =
        listen(cli.listen).with_context(|| format!("cannot listen on {}", cli.listen))?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        ended = engine::run(cli.engine, listener) => ended,
        _ = terminate.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
        () = stdin_eof(), if cli.exit_on_stdin_eof => Ok(()),
    }
}

/// As the engines' servers do, with room for many connections that are not taken yet: of 128, which is what `bind` asks for, a
/// burst of clients to an engine that stands still loses most, and each of them tries again only after seconds.
fn listen(at: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if at.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(at)?;
    socket.listen(2048)
}

/// Reads on a thread of its own: tokio's would keep the runtime from ending while a read is blocked.
async fn stdin_eof() {
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).ok();
        // Nobody waits any more when another reason ends the process.
        ended.send(()).ok();
    });
    end.await.ok();
}
