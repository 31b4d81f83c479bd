//! Queries with large bodies.

use tokio::sync::OwnedSemaphorePermit;

use super::*;

/// Returns a conversation that is not encoded on the caller's thread.
fn large_body() -> RequestBody {
    let text = "hello ".repeat(2000);
    RequestBody::Whole(
        json!({"model": "m", "messages": [{"role": "user", "content": text}]})
            .to_string()
            .into(),
    )
}

/// Preprocesses one request in its own task.
fn spawn_preprocess(
    preprocessor: &Arc<RequestPreprocessor>,
    body: RequestBody,
) -> tokio::task::JoinHandle<crate::request::PreprocessedRequest> {
    let preprocessor = preprocessor.clone();
    tokio::spawn(async move { preprocessor.preprocess(PATH, &|_| None, &body).await })
}

async fn wait_until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .expect("condition not met within 30 s");
}

/// Takes all encoder permits, so that no encoder thread is free until they are dropped.
async fn occupy_encoders(preprocessor: &RequestPreprocessor) -> OwnedSemaphorePermit {
    let encoders = preprocessor.encoders.threads.clone();
    let count = encoders.available_permits() as u32;
    encoders.acquire_many_owned(count).await.unwrap()
}

#[tokio::test]
async fn large_queries_are_prepared_on_encoder_threads() {
    let (url, calls) = server(200, TOKENS.into(), Duration::ZERO).await;
    let config = EngineTokensConfig {
        timeout: DurationSetting::millis(20),
        ..config_with_long_timeout(vec![url.clone()])
    };
    let (preprocessor, metrics) = new_preprocessor(&config, MediaTokens::default());
    let permits = occupy_encoders(&preprocessor).await;
    let first = spawn_preprocess(&preprocessor, large_body());
    wait_until(|| count_outcomes(&metrics, "timeout") == 1).await;
    drop(permits);
    first.await.unwrap();
    // A full queue rejects the query.
    let (preprocessor, metrics) =
        new_preprocessor(&config_with_long_timeout(vec![url]), MediaTokens::default());
    let slot = preprocessor.encoders.queue.try_acquire().unwrap();
    spawn_preprocess(&preprocessor, large_body()).await.unwrap();
    drop(slot);
    assert_eq!(
        (
            count_outcomes(&metrics, "busy"),
            calls.load(Ordering::SeqCst)
        ),
        (1, 0)
    );
    spawn_preprocess(&preprocessor, large_body()).await.unwrap();
    assert_eq!(
        (count_outcomes(&metrics, "ok"), calls.load(Ordering::SeqCst)),
        (1, 1)
    );
}

#[tokio::test]
async fn bodies_beyond_in_flight_limit_are_not_parsed() {
    let (slow, calls) = server(200, TOKENS.into(), Duration::from_secs(600)).await;
    let config = EngineTokensConfig {
        max_concurrency: 1,
        ..config_with_long_timeout(vec![slow])
    };
    let (preprocessor, metrics) = new_preprocessor(&config, MediaTokens::default());
    let first = spawn_preprocess(
        &preprocessor,
        RequestBody::Whole(json!({"model": "m", "messages": []}).to_string().into()),
    );
    wait_until(|| calls.load(Ordering::SeqCst) == 1).await;
    let permits = occupy_encoders(&preprocessor).await;
    let second = spawn_preprocess(&preprocessor, large_body());
    wait_until(|| count_outcomes(&metrics, "busy") == 1).await;
    drop(permits);
    second.await.unwrap();
    first.abort();
}
