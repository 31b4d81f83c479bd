//! Freshness of the index after lost batches.

use super::*;

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn gap_without_replay_endpoint_makes_rank_stale() {
    for attach in [SocketAttach::Connect, SocketAttach::Bind] {
        let site = EventSite::new(attach, false);
        let subscriber = site.subscribe();
        let mut engine = EventEngine::start(&site, vec![]).await;
        subscriber.wait_state(SourceLink::Attached).await;
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
