//! The life of a request, and everything that can end it.

use std::process::Command;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tonic::{Code, Request};
use warmroute::api::pb;

use crate::site::{PATIENCE, Site, attempt, book, rank, tokens, worker};

#[tokio::test]
async fn a_request_is_booked_prefilled_answered_and_freed() {
    let site = Site::plain().await;
    let mut client = site.client.clone();
    let answer = site.route(book("r", 0, 22)).await.unwrap();
    let decode = answer.decode.clone().unwrap();
    let chosen = decode.worker.unwrap();
    assert_eq!(decode.endpoint, format!("10.0.0.{}:8000", chosen.worker_id));
    assert_eq!(
        (answer.booked(), answer.mode()),
        (pb::Booked::Now, pb::Mode::Approximate)
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
    assert_eq!(
        (cost.prefill_cost, cost.decode_cost, cost.total),
        (44.0, 5.0, 49.0),
        "8 times 22 / 4, and 5 blocks"
    );
    assert_eq!(decode.potential_decode_blocks, 6, "with the partial tail");
    assert_eq!(site.load().await, (22, 5, 1));

    // The same by the pages, and for a request that shares four blocks.
    let page: serde_json::Value = serde_json::from_str(&site.page("debug/load").await).unwrap();
    let id = chosen.worker_id.to_string();
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
    let asked = pb::PotentialLoadsRequest {
        question: Some(tokens(18)),
        ..Default::default()
    };
    let loads = client
        .potential_loads(asked)
        .await
        .unwrap()
        .into_inner()
        .ranks;
    let with: Vec<_> = loads
        .iter()
        .map(|load| (load.potential_prefill_tokens, load.potential_decode_blocks))
        .collect();
    // What was routed is taken to be cached there, so 2 of the 18 tokens are new.
    let expected = if chosen.worker_id == 1 {
        [(24, 5), (18, 4)]
    } else {
        [(18, 4), (24, 5)]
    };
    assert_eq!(with, expected);

    let prefilled = pb::MarkPrefillCompletedRequest {
        attempt: attempt("r", 0),
    };
    assert!(
        client
            .mark_prefill_completed(prefilled.clone())
            .await
            .unwrap()
            .into_inner()
            .changed
    );
    assert!(
        !client
            .mark_prefill_completed(prefilled)
            .await
            .unwrap()
            .into_inner()
            .changed,
        "it was so already"
    );
    assert_eq!(site.load().await, (0, 5, 1));
    let output = |fraction| pb::AddOutputBlockRequest {
        attempt: attempt("r", 0),
        decay_fraction: fraction,
    };
    client.add_output_block(output(None)).await.unwrap();
    assert_eq!(site.load().await, (0, 6, 1));
    client.add_output_block(output(Some(0.5))).await.unwrap();
    assert_eq!(
        site.load().await,
        (0, 4, 1),
        "half of 5 + 2 blocks, rounded up"
    );
    assert!(site.free("r", 0).await);
    assert!(!site.free("r", 0).await);
    assert_eq!(site.load().await, (0, 0, 0));
    site.stop();
    site.stopped().await;
}

#[tokio::test]
async fn asking_books_nothing() {
    let site = Site::plain().await;
    let asked = pb::RouteRequest {
        book: None,
        with_tokens: true,
        ..book("", 0, 9)
    };
    let answer = site.route(asked).await.unwrap();
    assert_eq!(
        (answer.booked(), answer.prompts[0].token_ids.len()),
        (pb::Booked::Not, 9)
    );
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn the_same_attempt_gets_the_same_answer_and_a_later_one_takes_its_place() {
    let site = Site::plain().await;
    let first = site.route(book("r", 3, 22)).await.unwrap();
    let again = site.route(book("r", 3, 22)).await.unwrap();
    assert_eq!(
        again,
        pb::RouteResponse {
            booked: pb::Booked::Before.into(),
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
        pb::Booked::Now
    );
    assert!(!site.free("r", 3).await, "nor when it comes late");
    assert_eq!(site.load().await.2, 1);
    // Ended, and asked again because the answer to that was lost.
    assert!(site.free("r", 4).await);
    assert_eq!(
        site.route(book("r", 4, 22)).await.unwrap().booked(),
        pb::Booked::Before
    );
    assert_eq!(site.load().await.2, 0);
    site.route(book("r", 5, 22)).await.unwrap();

    // Many at once, as a client does that hedges: one booking.
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
async fn what_is_silent_for_too_long_is_released_and_may_be_booked_again() {
    let site = Site::start(
        "api: {listen: '127.0.0.1:0', silence: 150ms}\n",
        &[worker(1, "")],
    )
    .await;
    site.route(book("r", 0, 22)).await.unwrap();
    assert_eq!(site.load().await.2, 1);
    site.loaded((0, 0, 0)).await;
    let page = site.page("metrics").await;
    for line in [
        "warmroute_api_bookings 0",
        "warmroute_api_bookings_expired_total 1",
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
    assert_eq!(answer.booked(), pb::Booked::Now);
}

#[tokio::test]
async fn what_others_routed_counts_where_they_say() {
    let roles = [worker(1, ", role: decode"), worker(2, ", role: prefill")];
    let site = Site::start("", &roles).await;
    let mut client = site.client.clone();
    let add = |id: &str, worker, prefills, cached_tokens| pb::AddRequestRequest {
        attempt: attempt(id, 0),
        worker: rank(worker),
        question: Some(tokens(22)),
        prefills,
        cached_tokens,
        overrides: None,
    };
    let answer = client
        .add_request(add("d", 1, Some(false), None))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens, answer.prompt_blocks),
        (pb::Booked::Now, 0, 5)
    );
    let answer = client
        .add_request(add("p", 2, None, Some(8)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens, answer.prompt_blocks),
        (pb::Booked::Now, 14, 0)
    );
    let answer = client
        .add_request(add("p", 2, None, Some(8)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens),
        (pb::Booked::Before, 14)
    );
    assert_eq!(
        client
            .add_request(add("p", 1, None, None))
            .await
            .unwrap_err()
            .code(),
        Code::AlreadyExists
    );
    assert_eq!(site.load().await, (14, 5, 2));
    // The prefill worker is done with the first token, and has nothing to free.
    let prefilled = pb::MarkPrefillCompletedRequest {
        attempt: attempt("p", 0),
    };
    assert!(
        client
            .mark_prefill_completed(prefilled.clone())
            .await
            .unwrap()
            .into_inner()
            .changed
    );
    assert_eq!(site.load().await, (0, 5, 1));
    // Both once more, their answers having been lost.
    assert!(
        !client
            .mark_prefill_completed(prefilled)
            .await
            .unwrap()
            .into_inner()
            .changed
    );
    let answer = client
        .add_request(add("p", 2, None, Some(8)))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (answer.booked(), answer.prefill_tokens),
        (pb::Booked::Before, 14)
    );
    assert_eq!(site.load().await, (0, 5, 1));
    assert!(site.free("d", 0).await);
    // Both phases by one call.
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
async fn who_waits_is_served_in_turn_and_who_leaves_leaves_nothing() {
    let site = Site::start("queue: {prefill_busy_threshold: 10}\n", &[worker(1, "")]).await;
    site.route(book("first", 0, 22)).await.unwrap();
    // Its own deadline passes.
    let mut asked = Request::new(book("late", 0, 22));
    asked.set_timeout(Duration::from_millis(50));
    let late = site.client.clone().route(asked).await.unwrap_err().code();
    assert!(
        matches!(late, Code::DeadlineExceeded | Code::Cancelled),
        "{late:?}"
    );
    site.waiting(0).await;
    // It leaves without a word.
    let leave = CancellationToken::new();
    let mut client = site.client.clone();
    let left = tokio::spawn(
        leave
            .clone()
            .run_until_cancelled_owned(async move { client.route(book("left", 0, 22)).await }),
    );
    site.waiting(1).await;
    leave.cancel();
    assert!(left.await.unwrap().is_none());
    site.waiting(0).await;
    // It stays, and the first one's prefill ends.
    let mut client = site.client.clone();
    let stays = tokio::spawn(async move { client.route(book("stays", 0, 22)).await });
    site.waiting(1).await;
    assert!(site.free("first", 0).await);
    let answer = tokio::time::timeout(PATIENCE, stays)
        .await
        .unwrap()
        .unwrap()
        .unwrap()
        .into_inner();
    assert_eq!(answer.booked(), pb::Booked::Now);
    assert_eq!(site.load().await.2, 1);
    assert!(!site.free("late", 0).await && !site.free("left", 0).await);
    assert!(site.free("stays", 0).await);
    assert_eq!(site.load().await, (0, 0, 0));
}

#[tokio::test]
async fn a_session_stays_where_it_is_as_long_as_it_is_booked() {
    let site = Site::start(
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
        assert_eq!(next, first, "though the others are idle");
    }
    let running = |page: &serde_json::Value| {
        page.as_str()
            .unwrap()
            .contains("warmroute_session_requests 6\n")
    };
    site.until("six requests of sessions", running, "metrics")
        .await;
    for id in 0..6 {
        assert!(site.free(&id.to_string(), 0).await);
    }
    let none = |page: &serde_json::Value| {
        page.as_str()
            .unwrap()
            .contains("warmroute_session_requests 0\n")
    };
    site.until("no request of a session", none, "metrics").await;
}

#[test]
fn the_library_does_the_same_without_a_server() {
    let tests = std::env::current_exe().unwrap();
    let program = tests
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("embed");
    // A whole `cargo test` builds it first; a run of this test alone does not.
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
    let site = Site::begin(
        "disaggregation: {enforce: true}\n",
        &[worker(1, ", role: decode")],
    )
    .await;
    site.until(
        "a fleet",
        |page| {
            page.as_str()
                .is_some_and(|page| page.contains("warmroute_workers 1\n"))
        },
        "metrics",
    )
    .await;
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    site.until("waiting", |page| page["ready"] == false, "readyz")
        .await;
    assert!(site.page("readyz").await.contains("prefill workers"));
    site.list(&[worker(1, ", role: decode"), worker(2, ", role: prefill")]);
    site.until("ready", |page| page["ready"] == true, "readyz")
        .await;
}
