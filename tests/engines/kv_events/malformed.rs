//! Malformed and oversized messages, and replay endpoints that do not respond.

use super::*;

#[tokio::test]
async fn undecodable_batch_is_replayed_once_then_skipped() {
    let site = EventSite::new(SocketAttach::Connect, true);
    let subscriber = site.subscribe();
    let mut engine = EventEngine::start(&site, vec![]).await;
    subscriber.wait_state(SourceState::Live).await;
    subscriber.expect_blocks(&mut engine, [1]).await;
    subscriber.wait_blocks([0, 1]).await;
    engine.publish(vec![0xc1]).await;
    engine.publish(payload(2)).await;
    engine.publish(payload(3)).await;
    subscriber.wait_blocks(0..=3).await;
    assert_eq!(subscriber.batches("undecodable"), 2);
    assert_eq!(subscriber.held.lock().losses, 1);
}

/// Returns batches that exceed a limit: one is too long to be received, the other has too many
/// extra keys.
fn too_large_payloads() -> [(&'static str, Vec<u8>); 2] {
    let keys = rmp_serde::to_vec(&vec![(); 100_000]).unwrap();
    let head = [
        &b"\x93\x01\x91\x99\xabBlockStored\x91\x09\xc0\x91\x01\x02\xc0\xc0\xc0"[..],
        &keys,
        b"\x00",
    ]
    .concat();
    [("message", vec![0; MAX_MESSAGE + 1]), ("extra_keys", head)]
}

#[tokio::test]
async fn too_large_batch_without_replay_is_counted_lost() {
    for (limit, too_large) in too_large_payloads() {
        let site = EventSite::new(SocketAttach::Connect, false);
        let subscriber = site.subscribe();
        let mut engine = EventEngine::start(&site, vec![]).await;
        subscriber.wait_state(SourceState::Live).await;
        subscriber.expect_blocks(&mut engine, [1]).await;
        subscriber.wait_blocks([0, 1]).await;
        let lost = subscriber.gaps("lost");
        let losses = subscriber.held.lock().losses;
        engine.publish(too_large).await;
        subscriber
            .expect_freshness(IndexFreshness::Stale, Some(StaleReason::Undecodable))
            .await;
        assert_eq!(subscriber.too_large(limit), 1);
        engine.publish(payload(2)).await;
        subscriber.wait_blocks(0..=2).await;
        assert_eq!(
            subscriber.gaps("lost"),
            lost + 1,
            "{limit}: the event position does not count the batch as applied"
        );
        assert_eq!(subscriber.held.lock().losses, losses + 1, "{limit}");
        subscriber
            .expect_freshness(IndexFreshness::Stale, Some(StaleReason::LostBatches))
            .await;
    }
}

#[tokio::test]
async fn replay_continues_behind_a_too_large_batch() {
    for (limit, too_large) in too_large_payloads() {
        let site = EventSite::new(SocketAttach::Connect, true);
        let log = vec![payload(0), payload(1), too_large, payload(3), payload(4)];
        let mut engine = EventEngine::start(&site, log).await;
        let subscriber = site.subscribe();
        subscriber.wait_blocks([0, 1, 3, 4]).await;
        subscriber.wait_state(SourceState::Live).await;
        assert!(subscriber.too_large(limit) >= 1, "{limit}");
        assert!(
            subscriber.held.lock().losses >= 1,
            "{limit}: the batch is lost"
        );
        engine.publish(payload(5)).await;
        subscriber.wait_blocks([0, 1, 3, 4, 5]).await;
    }
}

/// Regression test: nine bytes from an event publisher aborted the process, because they announced
/// a frame that is too long to be allocated.
#[tokio::test]
async fn announced_frame_length_does_not_abort_the_process() {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    let hostile = [&greeting[..], &[2], &(1_u64 << 62).to_be_bytes()].concat();

    let site = EventSite::new(SocketAttach::Bind, false);
    let subscriber = site.subscribe();
    let address = site.events.replace("tcp://", "");
    let mut peer = loop {
        if let Ok(peer) = TcpStream::connect(&address).await {
            break peer;
        }
        sleep(Duration::from_millis(10)).await;
    };
    peer.write_all(&hostile).await.unwrap();
    until("the publisher is rejected", || {
        subscriber.connection_errors("protocol") == 1
    })
    .await;
    let mut engine = EventEngine::start(&site, vec![]).await;
    subscriber.wait_state(SourceState::Live).await;
    subscriber.expect_blocks(&mut engine, [1]).await;
    subscriber.wait_blocks([0, 1]).await;

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let events = format!("tcp://{}", listener.local_addr().unwrap());
    let site = EventSite {
        events,
        replay: None,
        attach: SocketAttach::Connect,
        shape: EventShape::Short,
    };
    let subscriber = site.subscribe();
    let (mut peer, _) = listener.accept().await.unwrap();
    peer.write_all(&hostile).await.unwrap();
    until("the connection is closed", || {
        subscriber.connection_errors("protocol") == 1
    })
    .await;
}

#[tokio::test]
async fn malformed_messages_are_counted_and_skipped() {
    let site = EventSite::new(SocketAttach::Connect, true);
    let subscriber = site.subscribe();
    let mut engine = EventEngine::start(&site, vec![]).await;
    subscriber.wait_state(SourceState::Live).await;
    subscriber.expect_blocks(&mut engine, []).await;
    let topic = TOPIC.as_bytes();
    for malformed in [message([topic]), message([topic, b"short", b"x"])] {
        engine.publisher.send(malformed).await.unwrap();
    }
    engine.publish(payload(1)).await;
    subscriber.wait_blocks([0, 1]).await;
    assert_eq!(subscriber.batches("malformed_frames"), 2);
}

#[tokio::test]
async fn batches_of_another_rank_are_dropped() {
    let site = EventSite::new(SocketAttach::Connect, true);
    let other = rmp_serde::to_vec(&(
        1.5,
        [("BlockStored", [9u64], None::<u64>, [1u32, 2], 2u32)],
        1,
    ))
    .unwrap();
    let _engine = EventEngine::start(&site, vec![payload(1), other, payload(2)]).await;
    let subscriber = site.subscribe();
    subscriber.wait_blocks([1, 2]).await;
    assert!(subscriber.batches("other_rank") >= 1);
}

#[tokio::test]
async fn silent_replay_endpoint_does_not_block_live_events() {
    let site = EventSite::new(SocketAttach::Connect, true);
    let without_replay = EventSite {
        replay: None,
        ..site.clone()
    };
    // This engine has no replay socket, so the configured replay endpoint never replies.
    let mut engine = EventEngine::start(&without_replay, vec![]).await;
    let subscriber = site.subscribe();
    subscriber.wait_state(SourceState::Live).await;
    subscriber.expect_blocks(&mut engine, [1]).await;
    engine.lose(payload(2));
    engine.publish(payload(3)).await;
    subscriber.wait_blocks([0, 1, 3]).await;
    assert!(subscriber.gaps("lost") >= 1);
    assert!(subscriber.held.lock().losses >= 1);
}

#[tokio::test]
async fn missing_replay_endpoint_does_not_block_live_events() {
    let connect_site = EventSite::new(SocketAttach::Connect, false);
    // The configured replay endpoint does not exist, because the engine was started without one.
    let site = EventSite {
        replay: EventSite::new(SocketAttach::Connect, true).replay,
        ..connect_site.clone()
    };
    let mut engine = EventEngine::start(&connect_site, vec![]).await;
    let subscriber = site.subscribe();
    subscriber.wait_state(SourceState::Live).await;
    subscriber.expect_blocks(&mut engine, []).await;
    let began = Instant::now();
    let lost = subscriber.gaps("lost");
    for block in 1..=5 {
        engine.lose(payload(100 + block));
        engine.publish(payload(block)).await;
    }
    subscriber.wait_blocks(0..=5).await;
    assert_eq!(subscriber.gaps("lost"), lost + 5);
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "each gap waited for a connection: {:?}",
        began.elapsed()
    );
}
