//! SGLang's disaggregation. The prefill and the decode engine receive the same request at the same
//! time. They pair up by its `bootstrap_room` on the prefill engine's bootstrap server. As in
//! SGLang, the prefill engine computes only after the decode engine has joined and has allocated
//! the blocks. It responds after the transfer. An engine without its peer waits for minutes. The
//! prefill engine does not detect that the decode engine disconnected. Unless the request is
//! aborted, it computes and holds the blocks until the timeout.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::SimEngine;
use super::cache::{BlockKeys, TokenSequence};
use super::disaggregation::{TransferCounters, increment};
use super::error::OpenAiError;
use super::json_connection::JsonConnection;
use super::kv_origin::{KvOrigin, WorstOrigin};
use super::rank::{EngineRank, SequenceHandle};
use super::scheduler::{RemotePhase, TokenOutput};

/// Delay between two connection attempts to a prefill engine.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// A decode engine that joined a room: its request and the channels to its connection.
#[derive(Debug)]
struct DecodePeer {
    prompt: Vec<u32>,
    /// See [`keys_json`].
    keys: Value,
    from_decode: mpsc::Receiver<Value>,
    to_decode: mpsc::Sender<Value>,
}

impl DecodePeer {
    /// Waits until the decode engine has the blocks. Never returns if it disconnected.
    async fn done(&mut self) {
        if self.from_decode.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

/// The engine that waits in a room for its peer.
#[derive(Debug)]
enum WaitingSide {
    Prefill(oneshot::Sender<DecodePeer>),
    Decode(DecodePeer),
}

/// The bootstrap rooms of a prefill engine in which one engine waits for the other.
#[derive(Debug, Default)]
pub(crate) struct BootstrapRooms(Mutex<HashMap<u64, WaitingSide>>);

impl BootstrapRooms {
    pub(crate) fn waiting(&self) -> usize {
        self.0.lock().len()
    }

    /// Joins as prefill engine and returns the receiver for the decode peer. Fails if a prefill
    /// already waits in the room.
    fn join_prefill(&self, room: u64) -> Result<oneshot::Receiver<DecodePeer>, ()> {
        let (peer_tx, peer_rx) = oneshot::channel();
        match self.0.lock().entry(room) {
            Entry::Vacant(entry) => {
                entry.insert(WaitingSide::Prefill(peer_tx));
            }
            Entry::Occupied(entry) if matches!(entry.get(), WaitingSide::Prefill(_)) => {
                return Err(());
            }
            Entry::Occupied(entry) => {
                if let WaitingSide::Decode(peer) = entry.remove() {
                    peer_tx.send(peer).ok();
                }
            }
        }
        Ok(peer_rx)
    }

    /// Joins as decode engine. Returns false if another decode engine already waits in the room.
    fn join_decode(&self, room: u64, peer: DecodePeer) -> bool {
        let mut rooms = self.0.lock();
        match rooms.remove(&room) {
            Some(WaitingSide::Prefill(peer_tx)) => {
                // The receiver is closed if the prefill was cancelled at this moment.
                peer_tx.send(peer).ok();
                true
            }
            Some(other) => {
                rooms.insert(room, other);
                false
            }
            None => {
                rooms.insert(room, WaitingSide::Decode(peer));
                true
            }
        }
    }

    /// Removes a cancelled prefill from its room.
    fn leave_prefill(&self, room: u64) {
        let mut rooms = self.0.lock();
        if matches!(rooms.get(&room), Some(WaitingSide::Prefill(peer_tx)) if peer_tx.is_closed()) {
            rooms.remove(&room);
        }
    }

    /// Removes a disconnected decode engine from its room.
    fn leave_decode(&self, room: u64) {
        let mut rooms = self.0.lock();
        if matches!(rooms.get(&room), Some(WaitingSide::Decode(peer)) if peer.to_decode.is_closed())
        {
            rooms.remove(&room);
        }
    }
}

/// Serves decode engines until the task is dropped.
pub(crate) async fn serve(rooms: Arc<BootstrapRooms>, listener: TcpListener) -> io::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        let rooms = rooms.clone();
        connections.spawn(async move { relay(&rooms, JsonConnection::new(stream)).await.ok() });
    }
}

/// Relays messages between a decode engine and the prefill request of its room.
async fn relay(rooms: &BootstrapRooms, mut connection: JsonConnection) -> io::Result<()> {
    let request = connection.receive().await?;
    let Some(room) = request["room"].as_u64() else {
        return Ok(());
    };
    let prompt = serde_json::from_value(request["prompt"].clone())?;
    let (to_prefill, from_decode) = mpsc::channel(4);
    let (to_decode, mut from_prefill) = mpsc::channel(4);
    let peer = DecodePeer {
        prompt,
        keys: request["keys"].clone(),
        from_decode,
        to_decode,
    };
    if !rooms.join_decode(room, peer) {
        return connection
            .send(&json!({"error": "mismatch: the room is taken by another decode request"}))
            .await;
    }
    let result = loop {
        tokio::select! {
            message = connection.receive() => match message {
                // A cancelled prefill needs no further messages.
                Ok(message) => { to_prefill.send(message).await.ok(); }
                Err(error) => break Err(error),
            },
            message = from_prefill.recv() => match message {
                Some(message) => connection.send(&message).await?,
                None => break connection.send(&json!({"error": "the prefill was cancelled"})).await,
            },
        }
    };
    drop(from_prefill);
    rooms.leave_decode(room);
    result
}

/// Presence of one engine in a room. If it is dropped before the peer joins, a timeout is counted.
struct RoomGuard<'a> {
    room: u64,
    /// Rooms from which the guard removes the prefill; `None` on a decode engine.
    prefill_rooms: Option<&'a BootstrapRooms>,
    counters: &'a TransferCounters,
    is_paired: bool,
}

impl RoomGuard<'_> {
    fn mark_paired(&mut self) {
        self.is_paired = true;
        increment(&self.counters.rooms_met);
    }

    fn mark_mismatched(&mut self) {
        self.is_paired = true;
        increment(&self.counters.rooms_mismatched);
    }
}

impl Drop for RoomGuard<'_> {
    fn drop(&mut self) {
        if let Some(rooms) = self.prefill_rooms {
            rooms.leave_prefill(self.room);
        }
        if !self.is_paired {
            increment(&self.counters.rooms_unmet);
        }
    }
}

/// Lease on the blocks for the decode engine of one room; dropping it ends the lease.
struct LeaseGuard<'a> {
    rank: &'a EngineRank,
    id: &'a str,
}

impl Drop for LeaseGuard<'_> {
    fn drop(&mut self) {
        self.rank.end_lease(self.id);
    }
}

/// The sequence of one choice and the tokens to generate.
#[derive(Debug)]
pub(crate) struct SequenceTask {
    /// Index of the choice among all choices of the request.
    pub(crate) index: usize,
    pub(crate) sequence: TokenSequence,
    pub(crate) answer: Vec<u32>,
}

/// Runs the prefill: waits for the decode engine, computes, and returns the tokens once the decode
/// engine has the blocks.
pub(crate) async fn run_prefill(
    engine: Arc<SimEngine>,
    rank: Arc<EngineRank>,
    room: u64,
    task: SequenceTask,
) -> Result<Vec<TokenOutput>, OpenAiError> {
    let prefill_error = |reason: &str| {
        OpenAiError::internal(format!(
            "Prefill failed for bootstrap_room={room}: {reason}"
        ))
    };
    let counters = &engine.transfer_counters;
    let Ok(peer) = engine.bootstrap_rooms.join_prefill(room) else {
        increment(&counters.rooms_mismatched);
        return Err(prefill_error("the room is taken by another request"));
    };
    let mut guard = RoomGuard {
        room,
        prefill_rooms: Some(&engine.bootstrap_rooms),
        counters,
        is_paired: false,
    };
    let peer = timeout(engine.config.disaggregation.bootstrap_timeout, peer).await;
    let Ok(Ok(mut peer)) = peer else {
        return Err(prefill_error("no peer joined the room in time"));
    };
    if peer.prompt != task.sequence.tokens() || peer.keys != keys_json(task.sequence.keys()) {
        guard.mark_mismatched();
        peer.to_decode
            .send(json!({"error": "mismatch: the room is for another prompt"}))
            .await
            .ok();
        return Err(prefill_error(
            "mismatch: the decode side waits for another prompt",
        ));
    }
    guard.mark_paired();
    peer.to_decode.send(json!({"met": true})).await.ok();
    let lease_id = format!("room {room}");
    let _lease = LeaseGuard {
        rank: &rank,
        id: &lease_id,
    };
    let remote_phase = RemotePhase::Decode {
        name: lease_id.as_str().into(),
        can_be_aborted: true,
    };
    let mut handle = rank.submit(task.sequence, task.answer, remote_phase);
    let mut outputs = Vec::new();
    while let Some(output) = handle.next().await {
        outputs.push(output);
    }
    peer.to_decode.send(json!({"ready": true})).await.ok();
    let done = timeout(engine.config.disaggregation.bootstrap_timeout, peer.done()).await;
    done.map(|()| outputs)
        .map_err(|_| prefill_error("the decode side did not fetch the blocks in time"))
}

/// Returns the keys of the blocks in the form that the engines compare.
fn keys_json(keys: &BlockKeys) -> Value {
    json!({"lora": keys.lora.as_ref().map(|lora| &lora.name), "salt": keys.salt})
}

/// Address of a room on a prefill engine's bootstrap server.
#[derive(Debug)]
pub(crate) struct RoomAddress {
    pub(crate) server: String,
    pub(crate) room: u64,
}

/// Runs the decode: allocates blocks, joins the prefill's room, waits for the prefill and fetches
/// the blocks.
pub(crate) async fn run_decode(
    engine: Arc<SimEngine>,
    rank: Arc<EngineRank>,
    address: RoomAddress,
    task: SequenceTask,
    worst_origin: WorstOrigin,
) -> Result<SequenceHandle, OpenAiError> {
    let RoomAddress { server, room } = address;
    let decode_error = |reason: &str| {
        OpenAiError::internal(format!(
            "Decode failed for bootstrap_room={room} at {server}: {reason}"
        ))
    };
    let request = json!({"room": room, "prompt": task.sequence.tokens(), "keys": keys_json(task.sequence.keys())});
    let mut guard = RoomGuard {
        room,
        prefill_rooms: None,
        counters: &engine.transfer_counters,
        is_paired: false,
    };
    let mut handle = rank.submit(task.sequence, task.answer, RemotePhase::Prefill);
    let blocks = handle.allocated_blocks().await;
    let disaggregation = &engine.config.disaggregation;
    let connect_timeout = disaggregation.bootstrap_connect_timeout;
    let deadline = Instant::now() + disaggregation.bootstrap_timeout;
    let connected = timeout(connect_timeout, connect_with_retry(&server)).await;
    let mut connection =
        connected.map_err(|_| decode_error("the bootstrap server cannot be reached"))?;
    let join = async {
        connection.send(&request).await?;
        connection.receive().await
    };
    let joined = timeout_at(deadline, join)
        .await
        .map_err(|_| decode_error("no peer joined the room in time"))?;
    match check_reply(joined, connect_timeout).await {
        Ok(_) => guard.mark_paired(),
        Err(reason) => {
            if reason.starts_with("mismatch") {
                guard.mark_mismatched();
            }
            return Err(decode_error(&reason));
        }
    }
    let ready = timeout(disaggregation.bootstrap_timeout, connection.receive())
        .await
        .map_err(|_| decode_error("the prefill side did not finish in time"))?;
    check_reply(ready, connect_timeout)
        .await
        .map_err(|reason| decode_error(&reason))?;
    sleep(rank.timing.transfer(blocks)).await;
    connection
        .send(&json!({"done": true}))
        .await
        .map_err(|error| decode_error(&error.to_string()))?;
    increment(&engine.transfer_counters.kv_transfers);
    worst_origin.record(KvOrigin::Fetched);
    handle.received();
    Ok(handle)
}

async fn connect_with_retry(address: &str) -> JsonConnection {
    loop {
        match JsonConnection::connect(address).await {
            Ok(connection) => return connection,
            Err(_) => sleep(CONNECT_RETRY_DELAY).await,
        }
    }
}

/// Returns the prefill engine's message, or its error. A lost connection is reported only after
/// `detection_delay`, because a decode engine detects a failed peer only by a timeout.
async fn check_reply(reply: io::Result<Value>, detection_delay: Duration) -> Result<Value, String> {
    match reply {
        Ok(message) => match message["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(message),
        },
        Err(error) => {
            sleep(detection_delay).await;
            Err(format!("the prefill side disconnected: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_peer() -> (DecodePeer, mpsc::Receiver<Value>) {
        let (to_decode, from_prefill) = mpsc::channel(1);
        let (_, from_decode) = mpsc::channel(1);
        let peer = DecodePeer {
            prompt: vec![1],
            keys: Value::Null,
            from_decode,
            to_decode,
        };
        (peer, from_prefill)
    }

    #[test]
    fn two_sides_pair_up_and_third_is_rejected() {
        let rooms = BootstrapRooms::default();
        let mut prefill = rooms.join_prefill(1).unwrap();
        assert!(rooms.join_prefill(1).is_err());
        let (first, _first_rx) = decode_peer();
        assert!(rooms.join_decode(1, first));
        assert!(prefill.try_recv().is_ok());
        let (first, _first_rx) = decode_peer();
        let (second, _) = decode_peer();
        assert!(rooms.join_decode(2, first) && !rooms.join_decode(2, second));
        assert!(rooms.join_prefill(2).unwrap().try_recv().is_ok());
        assert_eq!(rooms.waiting(), 0);
    }

    #[test]
    fn leaving_removes_only_closed_entry_of_own_side() {
        let rooms = BootstrapRooms::default();
        let (waiting, from_prefill) = decode_peer();
        rooms.join_decode(1, waiting);
        let prefill = rooms.join_prefill(2).unwrap();
        for room in [1, 2] {
            rooms.leave_prefill(room);
            rooms.leave_decode(room);
        }
        assert_eq!(rooms.waiting(), 2, "both still wait");
        drop(from_prefill);
        rooms.leave_decode(1);
        assert_eq!(rooms.waiting(), 1);
        drop(prefill);
        rooms.leave_prefill(2);
        assert_eq!(rooms.waiting(), 0);
    }
}
