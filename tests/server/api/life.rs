//! Lifecycle of a booking, and all events that end it.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request};
use warmroute_server::proto::router as pb;
use warmroute_testbed::ports::PATIENCE;

use crate::api::site::{ApiSite, attempt, book, rank, tokens, worker};

#[tokio::test]
async fn request_passes_its_whole_lifecycle() {
    let site = ApiSite::plain().await;
    let answer = site.route(book("r", 0, 22)).await.unwrap();
    assert_booked(&answer);
    assert_eq!(site.load().await, (22, 5, 1));
    let chosen = answer.decode.unwrap().worker.unwrap();
    assert_loads_are_reported(&site, chosen.worker_id).await;

    let mark = async || mark_prefill_completed(&site, "r").await;
    assert!(mark().await);
    assert!(!mark().await, "the prefill is already completed");
    assert_eq!(site.load().await, (0, 5, 1));
    let output = async |decay_fraction| {
        let request = pb::AddOutputBlockRequest {
            attempt: attempt("r", 0),
            decay_fraction,
        };
        site.client.clone().add_output_block(request).await.unwrap();
        site.load().await
    };
    assert_eq!(output(None).await, (0, 6, 1));
    assert_eq!(
        output(Some(0.5)).await,
        (0, 4, 1),
        "half of 5 + 2 blocks, rounded up"
    );
    assert!(site.free("r", 0).await);
    assert!(!site.free("r", 0).await);
    assert_eq!(site.load().await, (0, 0, 0));
    site.end().await;
}

/// Returns true if the call has changed the booking.
async fn mark_prefill_completed(site: &ApiSite, id: &str) -> bool {
    let attempt = attempt(id, 0);
    let call_request = pb::MarkPrefillCompletedRequest { attempt };
    let mut client = site.client.clone();
    let response = client.mark_prefill_completed(call_request).await;
    response.unwrap().into_inner().changed
}

/// Asserts the response to a booked prompt of 22 tokens.
fn assert_booked(answer: &pb::RouteResponse) {
    let decode = answer.decode.clone().unwrap();
    let chosen = decode.worker.unwrap();
    assert_eq!(decode.endpoint, format!("10.0.0.{}:8000", chosen.worker_id));
    assert_eq!(
        (answer.booked(), answer.mode()),
        (pb::BookingOutcome::Booked, pb::Mode::Approximate)
    );
    assert_eq!(
        (
            answer.model.as_str(),
            answer.phases.as_str(),
            answer.reason.as_str()
        ),
        ("m", "aggregated", "")
    );
    assert_eq!(
        (answer.prompt_tokens, answer.block_size, answer.candidates),
        (22, 4, 2)
    );
    assert_eq!(
        (
            answer.prompts.len(),
            answer.prompts[0].sequence_hashes.len()
        ),
        (1, 5)
    );
    let cost = decode.cost.unwrap();
    let sum: f64 = cost.terms.iter().map(|term| term.value).sum();
    assert_eq!(cost.policy, "seconds");
    assert_eq!(cost.total, sum, "{cost:?}");
    assert!(cost.total > 0.0);
    assert_eq!(
        decode.potential_decode_blocks, 6,
        "including the partial last block"
    );
}

/// Asserts the load on the admin page, and the potential load for a request that shares four
/// blocks.
async fn assert_loads_are_reported(site: &ApiSite, chosen: u64) {
    let page: Value = serde_json::from_str(&site.text("debug/load").await).unwrap();
    let id = chosen.to_string();
    let row = page
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["rank"]["worker"] == id)
        .unwrap();
    assert_eq!(
        (&row["active_blocks"], &row["active_prefill_tokens"]),
        (&5.into(), &22.into())
    );
    let call_request = pb::PotentialLoadsRequest {
        query: Some(tokens(18)),
        ..Default::default()
    };
    let loads = site
        .client
        .clone()
        .potential_loads(call_request)
        .await
        .unwrap()
        .into_inner()
        .ranks;
    let with: Vec<_> = loads
        .iter()
        .map(|load| (load.potential_prefill_tokens, load.potential_decode_blocks))
        .collect();
    // Routed blocks count as cached, so 2 of the 18 tokens are new.
    let expected = if chosen == 1 {
        [(24, 5), (18, 4)]
    } else {
        [(18, 4), (24, 5)]
    };
    assert_eq!(with, expected);
}

#[tokio::test]
async fn route_without_book_holds_nothing() {
    let site = ApiSite::plain().await;
    let call_request = pb::RouteRequest {
        book: None,
        include_token_ids: true,
        ..book("", 0, 9)
    };
    let answer = site.route(call_request).await.unwrap();
    assert_eq!(
        (answer.booked(), answer.prompts[0].token_ids.len()),
        (pb::BookingOutcome::NotBooked, 9)
    );
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn repeated_attempt_is_idempotent_and_later_replaces() {
    let site = ApiSite::plain().await;
    let first = site.route(book("r", 3, 22)).await.unwrap();
    let again = site.route(book("r", 3, 22)).await.unwrap();
    assert_eq!(
        again,
        pb::RouteResponse {
            booked: pb::BookingOutcome::AlreadyBooked.into(),
            ..first.clone()
        }
    );
    assert_eq!(
        site.route(book("r", 2, 22)).await.unwrap_err().code(),
        Code::AlreadyExists
    );
    assert!(!site.free("r", 2).await, "an earlier attempt frees nothing");
    assert_eq!(site.load().await.2, 1);
    assert_eq!(
        site.route(book("r", 4, 22)).await.unwrap().booked(),
        pb::BookingOutcome::Booked
    );
    assert!(
        !site.free("r", 3).await,
        "a late call for an earlier attempt frees nothing"
    );
    assert_eq!(site.load().await.2, 1);
    // The client repeats the request after its end, because the response was lost.
    assert!(site.free("r", 4).await);
    assert_eq!(
        site.route(book("r", 4, 22)).await.unwrap().booked(),
        pb::BookingOutcome::AlreadyBooked
    );
    assert_eq!(site.load().await.2, 0);
    site.route(book("r", 5, 22)).await.unwrap();

    // Concurrent calls of a client that hedges result in one booking.
    let hedged = (0..32).map(|_| site.route(book("h", 0, 22)));
    let answers = futures_util::future::join_all(hedged).await;
    let workers: Vec<_> = answers
        .iter()
        .map(|answer| answer.as_ref().unwrap().decode.as_ref().unwrap().worker)
        .collect();
    assert!(
        workers.iter().all(|worker| *worker == workers[0]),
        "{workers:?}"
    );
    assert_eq!(site.load().await.2, 2);
}

#[tokio::test]
async fn expired_booking_is_released_and_bookable() {
    let site = ApiSite::start(
        "listeners: {api: {address: '127.0.0.1:0', booking_timeout: 150ms}}\n",
        &[worker(1, "")],
    )
    .await;
    site.route(book("r", 0, 22)).await.unwrap();
    assert_eq!(site.load().await.2, 1);
    site.wait_load((0, 0, 0)).await;
    let page = site.text("metrics").await;
    for line in [
        "warmroute_api_bookings 0",
        "warmroute_api_expired_bookings_total 1",
    ] {
        assert!(
            page.lines().any(|found| found == line),
            "{line} is not in {page}"
        );
    }
    let gone = pb::MarkPrefillCompletedRequest {
        attempt: attempt("r", 0),
    };
    assert_eq!(
        site.client
            .clone()
            .mark_prefill_completed(gone)
            .await
            .unwrap_err()
            .code(),
        Code::NotFound
    );
    let answer = site.route(book("r", 1, 22)).await.unwrap();
    assert_eq!(answer.booked(), pb::BookingOutcome::Booked);
}

#[tokio::test]
async fn external_bookings_count_on_their_rank() {
    let roles = [worker(1, ", role: decode"), worker(2, ", role: prefill")];
    let site = ApiSite::start("", &roles).await;
    let add = async |id: &str, worker, prefills, cached_tokens| {
        let request = pb::AddRequestRequest {
            attempt: attempt(id, 0),
            worker: rank(worker),
            query: Some(tokens(22)),
            prefills,
            cached_tokens,
            overrides: None,
        };
        site.client.clone().add_request(request).await
    };
    let mark = async || mark_prefill_completed(&site, "p").await;
    let answer = add("d", 1, Some(false), None).await.unwrap().into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens, answer.prompt_blocks),
        (pb::BookingOutcome::Booked, 0, 5)
    );
    let answer = add("p", 2, None, Some(8)).await.unwrap().into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens, answer.prompt_blocks),
        (pb::BookingOutcome::Booked, 14, 0)
    );
    let answer = add("p", 2, None, Some(8)).await.unwrap().into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens),
        (pb::BookingOutcome::AlreadyBooked, 14)
    );
    let elsewhere = add("p", 1, None, None).await.unwrap_err();
    assert_eq!(elsewhere.code(), Code::AlreadyExists);
    assert_eq!(site.load().await, (14, 5, 2));
    // The prefill worker is released at the first token, and has nothing left to free.
    assert!(mark().await);
    assert_eq!(site.load().await, (0, 5, 1));
    // The client repeats both calls, because the responses were lost.
    assert!(!mark().await);
    let answer = add("p", 2, None, Some(8)).await.unwrap().into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens),
        (pb::BookingOutcome::AlreadyBooked, 14)
    );
    assert_eq!(site.load().await, (0, 5, 1));
    assert!(site.free("d", 0).await);
}

#[tokio::test]
async fn one_call_books_both_phases() {
    let roles = [worker(1, ", role: decode"), worker(2, ", role: prefill")];
    let site = ApiSite::start("", &roles).await;
    let answer = site.route(book("r", 0, 22)).await.unwrap();
    let worker = |placed: Option<pb::Placement>| placed.unwrap().worker.unwrap().worker_id;
    assert_eq!(
        (
            worker(answer.decode),
            worker(answer.prefill),
            answer.phases.as_str()
        ),
        (1, 2, "remote_prefill")
    );
    assert_eq!(site.load().await.2, 2);
    assert!(site.free("r", 0).await);
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn queue_is_fair_and_cancellation_is_clean() {
    let site = ApiSite::start("queue: {prefill_busy_threshold: 10}\n", &[worker(1, "")]).await;
    site.route(book("first", 0, 22)).await.unwrap();
    // The deadline of the call expires.
    let mut call_request = Request::new(book("late", 0, 22));
    call_request.set_timeout(Duration::from_millis(50));
    let late = site
        .client
        .clone()
        .route(call_request)
        .await
        .unwrap_err()
        .code();
    assert!(
        matches!(late, Code::DeadlineExceeded | Code::Cancelled),
        "{late:?}"
    );
    site.wait_queued(0).await;
    // The caller disconnects.
    let leave = CancellationToken::new();
    let mut client = site.client.clone();
    let left = tokio::spawn(
        leave
            .clone()
            .run_until_cancelled_owned(async move { client.route(book("left", 0, 22)).await }),
    );
    site.wait_queued(1).await;
    leave.cancel();
    assert!(left.await.unwrap().is_none());
    site.wait_queued(0).await;
    // The caller waits until the prefill of the first request ends.
    let mut client = site.client.clone();
    let stays = tokio::spawn(async move { client.route(book("stays", 0, 22)).await });
    site.wait_queued(1).await;
    assert!(site.free("first", 0).await);
    let answer = tokio::time::timeout(PATIENCE, stays)
        .await
        .unwrap()
        .unwrap()
        .unwrap()
        .into_inner();
    assert_eq!(answer.booked(), pb::BookingOutcome::Booked);
    assert_eq!(site.load().await.2, 1);
    assert!(!site.free("late", 0).await && !site.free("left", 0).await);
    assert!(site.free("stays", 0).await);
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn session_stays_bound_while_booked() {
    let site = ApiSite::start(
        "sessions: {headers: [x-session]}\n",
        &[worker(1, ""), worker(2, ""), worker(3, "")],
    )
    .await;
    let session = |id: &str, count| pb::RouteRequest {
        session: Some(pb::Session {
            id: "s".into(),
            ..pb::Session::default()
        }),
        ..book(id, 0, count)
    };
    let worker = |answer: pb::RouteResponse| answer.decode.unwrap().worker.unwrap();
    let first = worker(site.route(session("0", 400)).await.unwrap());
    for id in 1..6 {
        let next = worker(site.route(session(&id.to_string(), 4)).await.unwrap());
        assert_eq!(
            next, first,
            "the session stays although other workers are idle"
        );
    }
    site.wait_line("warmroute_session_requests 6").await;
    for id in 0..6 {
        assert!(site.free(&id.to_string(), 0).await);
    }
    site.wait_line("warmroute_session_requests 0").await;
}

#[test]
fn library_matches_the_grpc_service() {
    let tests = std::env::current_exe().unwrap();
    let program = tests
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("embed");
    // `cargo test` builds the program first, but a run of only this test does not.
    assert!(
        program.exists(),
        "{} is missing: cargo build --examples",
        program.display()
    );
    let output = Command::new(program).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let [routed, booked, first_token, ended] = lines[..] else {
        panic!("{text}")
    };
    assert!(
        routed.starts_with("routed: worker=3/0 ") && routed.contains(" device=6 "),
        "{routed}"
    );
    assert!(
        booked.contains("active_blocks: 8, active_prefill_tokens: 34, active_requests: 1"),
        "{booked}"
    );
    assert!(
        first_token.contains("active_blocks: 8, active_prefill_tokens: 0, active_requests: 1"),
        "{first_token}"
    );
    assert!(
        ended.contains("active_blocks: 0, active_prefill_tokens: 0, active_requests: 0"),
        "{ended}"
    );
}

#[tokio::test]
async fn enforced_prefill_gates_readiness() {
    let site = ApiSite::begin(
        "routing: {disaggregation: {enforce: true}}\n",
        &[worker(1, ", role: decode")],
    )
    .await;
    site.wait_line("warmroute_workers 1").await;
    // The readiness of a set of workers is decided before the next set is published.
    site.set_workers(&[worker(1, ", role: decode"), worker(3, ", role: decode")]);
    site.wait_line("warmroute_workers 2").await;
    site.until("waiting", |page| page["ready"] == false, "readyz")
        .await;
    assert!(site.text("readyz").await.contains("prefill workers"));
    site.set_workers(&[worker(1, ", role: decode"), worker(2, ", role: prefill")]);
    site.until("ready", |page| page["ready"] == true, "readyz")
        .await;
}
