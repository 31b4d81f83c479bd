//! The engine simulator as a process: `cargo run --example engine_sim -- --tokenizer
//! examples/models/qwen2.5/tokenizer.json.gz --listen 127.0.0.1:8000`.

use std::net::SocketAddr;

use anyhow::Context as _;
use clap::Parser;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use warmroute_engine_sim::EngineConfig;

#[derive(Debug, Parser)]
struct EngineSimArgs {
    #[command(flatten)]
    engine: EngineConfig,
    /// Address of the HTTP server; port 0 selects a free port.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Exit when standard input ends, so that the engine cannot outlive the test that started it.
    #[arg(long)]
    exit_on_stdin_eof: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .init();
    let args = EngineSimArgs::parse();
    let listener =
        listen(args.listen).with_context(|| format!("cannot listen on {}", args.listen))?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = warmroute_engine_sim::run(args.engine, listener) => result,
        _ = terminate.recv() => Ok(()),
        result = tokio::signal::ctrl_c() => Ok(result?),
        () = stdin_eof(), if args.exit_on_stdin_eof => Ok(()),
    }
}

/// Listens with a long backlog, as real engine servers do. With the backlog of 128 that `bind`
/// uses, a burst of clients to a stalled engine would lose most connections. Each client would
/// retry only after seconds.
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

/// Waits for the end of standard input on a dedicated thread. tokio's stdin would block the
/// shutdown of the runtime during a read.
async fn stdin_eof() {
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).ok();
        // The receiver no longer exists if the process ends for another reason.
        ended.send(()).ok();
    });
    end.await.ok();
}
