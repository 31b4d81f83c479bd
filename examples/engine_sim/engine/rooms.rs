//! SGLang's way: prefill and decode get the same request at once and meet under the number of a room at the prefill side's
//! bootstrap server. As there, the prefill side computes only when the decode side is in the room with space for the
//! blocks, and answers when these are over; whoever is alone waits for minutes. And the prefill side does not notice that
//! the decode side went away: unless it is aborted it computes, and keeps the blocks until its time is over.

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

use super::Engine;
use super::cache::{Keys, Sequence};
use super::handover::{Counts, count};
use super::http::Refusal;
use super::line::Line;
use super::origin::{Origin, Worst};
use super::rank::{Rank, Ticket};
use super::scheduler::{Output, Part};

/// Between two attempts to reach a prefill engine that is not there.
const RETRY: Duration = Duration::from_millis(50);

/// A decode engine in a room: what it wants computed, and a way to talk.
#[derive(Debug)]
struct Guest {
    prompt: Vec<u32>,
    /// See [`keys_told`].
    keys: Value,
    says: mpsc::Receiver<Value>,
    hears: mpsc::Sender<Value>,
}

impl Guest {
    /// Waits until it has the blocks; for ever when it is gone.
    async fn done(&mut self) {
        if self.says.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

/// Who is in a room alone.
#[derive(Debug)]
enum Waiting {
    Host(oneshot::Sender<Guest>),
    Guest(Guest),
}

/// The rooms of a prefill engine in which one side waits for the other.
#[derive(Debug, Default)]
pub(crate) struct Rooms(Mutex<HashMap<u64, Waiting>>);

impl Rooms {
    pub(crate) fn waiting(&self) -> usize {
        self.0.lock().len()
    }

    /// Where the guest will come from, or that somebody else took the room.
    fn host(&self, room: u64) -> Result<oneshot::Receiver<Guest>, ()> {
        let (sender, receiver) = oneshot::channel();
        match self.0.lock().entry(room) {
            Entry::Vacant(entry) => {
                entry.insert(Waiting::Host(sender));
            }
            Entry::Occupied(entry) if matches!(entry.get(), Waiting::Host(_)) => return Err(()),
            Entry::Occupied(entry) => {
                if let Waiting::Guest(guest) = entry.remove() {
                    sender.send(guest).ok();
                }
            }
        }
        Ok(receiver)
    }

    /// Whether there was no other guest.
    fn visit(&self, room: u64, guest: Guest) -> bool {
        let mut rooms = self.0.lock();
        match rooms.remove(&room) {
            Some(Waiting::Host(host)) => {
                // A host that gave up took itself out of the table, or is just about to.
                host.send(guest).ok();
                true
            }
            Some(other) => {
                rooms.insert(room, other);
                false
            }
            None => {
                rooms.insert(room, Waiting::Guest(guest));
                true
            }
        }
    }

    fn leave_as_host(&self, room: u64) {
        let mut rooms = self.0.lock();
        if matches!(rooms.get(&room), Some(Waiting::Host(host)) if host.is_closed()) {
            rooms.remove(&room);
        }
    }

    fn leave_as_guest(&self, room: u64) {
        let mut rooms = self.0.lock();
        if matches!(rooms.get(&room), Some(Waiting::Guest(guest)) if guest.hears.is_closed()) {
            rooms.remove(&room);
        }
    }
}

/// Lets decode engines in, for ever.
pub(crate) async fn receive(rooms: Arc<Rooms>, listener: TcpListener) -> io::Result<()> {
    let mut talks = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        while talks.try_join_next().is_some() {}
        let rooms = rooms.clone();
        talks.spawn(async move { attend(&rooms, Line::new(stream)).await.ok() });
    }
}

/// Carries words between a decode engine and the request that waits for it.
async fn attend(rooms: &Rooms, mut line: Line) -> io::Result<()> {
    let word = line.hear().await?;
    let Some(room) = word["room"].as_u64() else {
        return Ok(());
    };
    let prompt = serde_json::from_value(word["prompt"].clone())?;
    let (to_host, says) = mpsc::channel(4);
    let (hears, mut from_host) = mpsc::channel(4);
    if !rooms.visit(
        room,
        Guest {
            prompt,
            keys: word["keys"].clone(),
            says,
            hears,
        },
    ) {
        return line
            .say(&json!({"error": "somebody else waits in this room"}))
            .await;
    }
    let talked = loop {
        tokio::select! {
            said = line.hear() => match said {
                // A host that is gone needs to hear nothing more.
                Ok(word) => { to_host.send(word).await.ok(); }
                Err(error) => break Err(error),
            },
            answer = from_host.recv() => match answer {
                Some(answer) => line.say(&answer).await?,
                None => break line.say(&json!({"error": "the prefill was given up"})).await,
            },
        }
    };
    drop(from_host);
    rooms.leave_as_guest(room);
    talked
}

/// A room that this side waits in. Left alone, it counts as unmet.
struct Stay<'a> {
    room: u64,
    hosted_in: Option<&'a Rooms>,
    counts: &'a Counts,
    is_met: bool,
}

impl Stay<'_> {
    fn meet(&mut self) {
        self.is_met = true;
        count(&self.counts.rooms_met);
    }

    fn mismatch(&mut self) {
        self.is_met = true;
        count(&self.counts.rooms_mismatched);
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        if let Some(rooms) = self.hosted_in {
            rooms.leave_as_host(self.room);
        }
        if !self.is_met {
            count(&self.counts.rooms_unmet);
        }
    }
}

/// Blocks that are kept for the guest of a room, and for nobody else.
struct Kept<'a>(&'a Rank, &'a str);

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.0.end_lease(self.1);
    }
}

/// A sequence and what it generates.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) sequence: Sequence,
    pub(crate) answer: Vec<u32>,
}

/// The prefill side: waits for the guest, computes, and gives its tokens when the guest has the blocks.
pub(crate) async fn host(
    engine: Arc<Engine>,
    rank: Arc<Rank>,
    room: u64,
    task: Task,
) -> Result<Vec<Output>, Refusal> {
    let failed =
        |why: &str| Refusal::failed(format!("Prefill failed for bootstrap_room={room}: {why}"));
    let counts = &engine.counts;
    let Ok(guest) = engine.rooms.host(room) else {
        count(&counts.rooms_mismatched);
        return Err(failed("the room is taken by another request"));
    };
    let mut stay = Stay {
        room,
        hosted_in: Some(&engine.rooms),
        counts,
        is_met: false,
    };
    let guest = timeout(engine.config.handover.bootstrap_timeout, guest).await;
    let Ok(Ok(mut guest)) = guest else {
        return Err(failed("nobody came into the room in time"));
    };
    if guest.prompt != task.sequence.tokens() || guest.keys != keys_told(task.sequence.keys()) {
        stay.mismatch();
        guest
            .hears
            .send(json!({"error": "mismatch: the room is for another prompt"}))
            .await
            .ok();
        return Err(failed("mismatch: the decode side waits for another prompt"));
    }
    stay.meet();
    guest.hears.send(json!({"met": true})).await.ok();
    let name = format!("room {room}");
    let _kept = Kept(&rank, &name);
    let part = Part::Lend {
        name: name.as_str().into(),
        can_be_aborted: true,
    };
    let mut ticket = rank.submit(task.sequence, task.answer, part);
    let mut outputs = Vec::new();
    while let Some(output) = ticket.next().await {
        outputs.push(output);
    }
    guest.hears.send(json!({"ready": true})).await.ok();
    let done = timeout(engine.config.handover.bootstrap_timeout, guest.done()).await;
    done.map(|()| outputs)
        .map_err(|_| failed("the decode side did not take the blocks in time"))
}

/// What separates the blocks of equal tokens, for who comes to compare.
fn keys_told(keys: &Keys) -> Value {
    json!({"lora": keys.lora.as_ref().map(|lora| &lora.name), "salt": keys.salt})
}

/// The decode side: when there is room for the blocks, meets the host, waits until it has computed, and takes the blocks.
pub(crate) async fn visit(
    engine: Arc<Engine>,
    rank: Arc<Rank>,
    (address, room): (String, u64),
    task: Task,
    worst: Worst,
) -> Result<Ticket, Refusal> {
    let failed = |why: &str| {
        Refusal::failed(format!(
            "Decode failed for bootstrap_room={room} at {address}: {why}"
        ))
    };
    let word = json!({"room": room, "prompt": task.sequence.tokens(), "keys": keys_told(task.sequence.keys())});
    let mut stay = Stay {
        room,
        hosted_in: None,
        counts: &engine.counts,
        is_met: false,
    };
    let mut ticket = rank.submit(task.sequence, task.answer, Part::Fetch);
    let blocks = ticket.room().await;
    let handover = &engine.config.handover;
    let (patience, until) = (
        handover.bootstrap_patience,
        Instant::now() + handover.bootstrap_timeout,
    );
    let reached = timeout(patience, reach(&address)).await;
    let mut line = reached.map_err(|_| failed("the bootstrap server cannot be reached"))?;
    let meeting = async {
        line.say(&word).await?;
        line.hear().await
    };
    let late = |_| failed("nobody came into the room in time");
    let met = given(timeout_at(until, meeting).await.map_err(late)?, patience).await;
    match met {
        Ok(_) => stay.meet(),
        Err(why) => {
            if why.starts_with("mismatch") || why.starts_with("somebody") {
                stay.mismatch();
            }
            return Err(failed(&why));
        }
    }
    let late = |_| failed("the prefill side did not finish in time");
    let ready = timeout(handover.bootstrap_timeout, line.hear())
        .await
        .map_err(late)?;
    given(ready, patience).await.map_err(|why| failed(&why))?;
    sleep(rank.pace.transfer(blocks)).await;
    line.say(&json!({"done": true}))
        .await
        .map_err(|error| failed(&error.to_string()))?;
    count(&engine.counts.kv_transfers);
    worst.note(Origin::Fetched);
    ticket.received();
    Ok(ticket)
}

async fn reach(address: &str) -> Line {
    loop {
        match Line::connect(address).await {
            Ok(line) => return line,
            Err(_) => sleep(RETRY).await,
        }
    }
}

/// What the host said. That it died is noticed only when it has not been heard of for a while.
async fn given(heard: io::Result<Value>, patience: Duration) -> Result<Value, String> {
    match heard {
        Ok(word) => match word["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(word),
        },
        Err(error) => {
            sleep(patience).await;
            Err(format!("the prefill side is gone: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> (Guest, mpsc::Receiver<Value>) {
        let (hears, heard) = mpsc::channel(1);
        let (_, says) = mpsc::channel(1);
        (
            Guest {
                prompt: vec![1],
                keys: Value::Null,
                says,
                hears,
            },
            heard,
        )
    }

    #[test]
    fn two_meet_whoever_comes_first_and_a_third_does_not_get_in() {
        let rooms = Rooms::default();
        let mut host = rooms.host(1).unwrap();
        assert!(rooms.host(1).is_err());
        let (first, _heard) = guest();
        assert!(rooms.visit(1, first));
        assert!(host.try_recv().is_ok());
        let ((first, _heard), (second, _)) = (guest(), guest());
        assert!(rooms.visit(2, first) && !rooms.visit(2, second));
        assert!(rooms.host(2).unwrap().try_recv().is_ok());
        assert_eq!(rooms.waiting(), 0);
    }

    #[test]
    fn who_leaves_takes_only_himself_out() {
        let rooms = Rooms::default();
        let (waits, heard) = guest();
        rooms.visit(1, waits);
        let host = rooms.host(2).unwrap();
        for room in [1, 2] {
            rooms.leave_as_host(room);
            rooms.leave_as_guest(room);
        }
        assert_eq!(rooms.waiting(), 2, "both are still there");
        drop(heard);
        rooms.leave_as_guest(1);
        assert_eq!(rooms.waiting(), 1);
        drop(host);
        rooms.leave_as_host(2);
        assert_eq!(rooms.waiting(), 0);
    }
}
