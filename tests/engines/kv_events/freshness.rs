//! Freshness of the index after lost batches.

use super::*;

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn gap_without_replay_endpoint_makes_rank_stale() {
    for attach in [SocketAttach::Connect, SocketAttach::Bind] {
        let site = EventSite::new(attach, false);
        let subscriber = site.subscribe();
        let mut engine = EventEngine::start(&site, vec![]).await;
        subscriber.wait_state(SourceState::Live).await;
        subscriber.expect_blocks(&mut engine, [1, 2]).await;
        subscriber.wait_blocks(0..=2).await;
        let losses = subscriber.held.lock().losses;
        engine.lose(payload(3));
        engine.publish(payload(4)).await;
        engine.publish(payload(5)).await;
        subscriber.wait_blocks([0, 1, 2, 4, 5]).await;
        assert!(subscriber.gaps("lost") >= 1);
        assert_eq!(subscriber.held.lock().losses, losses + 1);
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn index_freshness_follows_the_source() {
    let site = EventSite::new(SocketAttach::Connect, false);
    let subscriber = site.subscribe();
    subscriber
        .expect_freshness(IndexFreshness::CatchingUp, Some(StaleReason::Connecting))
        .await;
    let mut engine = EventEngine::start(&site, vec![]).await;
    subscriber
        .expect_freshness(IndexFreshness::Exact, None)
        .await;
    subscriber.expect_blocks(&mut engine, [1]).await;
    let facts = || subscriber.monitor.source().lock().facts();
    until("the last batch is reported", || {
        facts().last_number == Some(engine.log.lock().len() as u64 - 1)
    })
    .await;
    // The timestamps of the test engine are 1.5 seconds after 1970, so the lag is large.
    assert!(
        facts().lag_seconds.is_some_and(|lag| lag > 1e9) && !facts().clock_skew,
        "{:?}",
        facts()
    );
    engine.publish(b"nonsense".to_vec()).await;
    subscriber
        .expect_freshness(IndexFreshness::Stale, Some(StaleReason::Undecodable))
        .await;
    assert_eq!(facts().undecodable, 1);
    drop(engine);
    subscriber
        .expect_freshness(IndexFreshness::Stale, Some(StaleReason::Detached))
        .await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn lost_batches_are_stale_until_confirmed_or_evicted() {
    let site = EventSite::new(SocketAttach::Connect, false);
    let mut engine = EventEngine::start(&site, vec![]).await;
    let subscriber = site.subscribe();
    subscriber.wait_state(SourceState::Live).await;
    subscriber.expect_blocks(&mut engine, [1]).await;
    subscriber.wait_blocks([0, 1]).await;
    engine.lose(payload(50));
    engine.lose(payload(51));
    engine.publish(payload(2)).await;
    subscriber
        .expect_freshness(IndexFreshness::Stale, Some(StaleReason::LostBatches))
        .await;
    let facts = || subscriber.monitor.source().lock().facts();
    assert_eq!(facts().stale_blocks, 2);
    // Batch 0 may also have been lost, before the subscription took effect.
    assert!(
        facts().lost_batches >= 2 && facts().gaps >= 1,
        "{:?}",
        facts()
    );
    engine.publish(payload(0)).await;
    engine.publish(payload(1)).await;
    subscriber
        .expect_freshness(
            IndexFreshness::Incomplete,
            Some(StaleReason::UnreportedBlocks),
        )
        .await;
    subscriber.wait_blocks([0, 1, 2]).await;

    engine.lose(payload(52));
    engine.publish(payload(3)).await;
    subscriber
        .expect_freshness(IndexFreshness::Stale, Some(StaleReason::LostBatches))
        .await;
    for block in 4..12 {
        engine.publish(payload(block)).await;
    }
    subscriber.wait_blocks(0..12).await;
    assert_eq!(
        facts().stale_blocks,
        3,
        "new blocks evict no stale blocks, because the cache may be large enough"
    );
    engine.publish(removal(&[3, 4, 5])).await;
    subscriber.wait_blocks(6..12).await;
    // Blocks that were stored before the gap were never reported, and may still be cached.
    subscriber
        .expect_freshness(
            IndexFreshness::Incomplete,
            Some(StaleReason::UnreportedBlocks),
        )
        .await;
    engine.publish(removal(&[6, 7, 8])).await;
    subscriber
        .expect_freshness(IndexFreshness::Exact, None)
        .await;
    subscriber.wait_blocks(9..12).await;
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn lost_batches_clear_the_rank_if_configured() {
    let site = EventSite::new(SocketAttach::Connect, false);
    let mut engine = EventEngine::start(&site, vec![]).await;
    let subscriber = site.subscribe_with(ResyncMode::Clear);
    subscriber.wait_state(SourceState::Live).await;
    subscriber.expect_blocks(&mut engine, [1]).await;
    subscriber.wait_blocks([0, 1]).await;
    engine.lose(payload(50));
    engine.publish(payload(2)).await;
    subscriber.wait_blocks([2]).await;
    subscriber
        .expect_freshness(
            IndexFreshness::Incomplete,
            Some(StaleReason::UnreportedBlocks),
        )
        .await;
    assert_eq!(subscriber.monitor.source().lock().facts().stale_blocks, 0);
}
