use super::coding_agent::SessionSelection;
use super::mooncake::ArrivalSelection;
use super::*;

const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}
{"timestamp": 6000, "input_length": 90000, "output_length": 20, "hash_ids": []}
{"timestamp": 9000, "input_length": 64, "output_length": 0, "hash_ids": [7]}
"#;

const CODING_AGENT: &str = r#"{"session":"a","tool":64,"system":64,"requests":3,"blocks":8}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":200,"out":5000,"keep":0,"new":[[0,3]]}
{"a":0,"t":9.0,"think":5.0,"api":1.0,"in":320,"out":7,"keep":2,"new":[[3,2],[6,1]]}
{"a":0,"t":99.0,"think":90.0,"api":1.0,"in":320,"out":7,"keep":5,"new":[]}
{"session":"b","tool":64,"system":64,"requests":3,"blocks":4}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":256,"out":3,"keep":0,"new":[[0,4]]}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":256,"out":3,"keep":4,"new":[]}
{"a":0,"t":0.0,"think":0.0,"api":0.0,"in":256,"out":3,"keep":4,"new":[]}
"#;

fn parse(text: &str) -> RecordedTrace {
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    RecordedTrace::parse(&lines).unwrap()
}

fn arrivals(half: TraceHalf) -> Vec<ReplayedRequest> {
    let RecordedTrace::Mooncake(trace) = parse(MOONCAKE) else {
        panic!("wrong format")
    };
    let workload = trace.workload(&ArrivalSelection {
        half,
        speed: 2.0,
        max_tokens: 10_000,
        end_ms: 60_000.0,
        burst_copies: 0,
    });
    match workload {
        ReplayWorkload::Arrivals(requests) => requests,
        ReplayWorkload::Sessions { .. } => panic!("wrong workload"),
    }
}

fn sessions(half: TraceHalf) -> Vec<Vec<ReplayedRequest>> {
    let RecordedTrace::CodingAgent(trace) = parse(CODING_AGENT) else {
        panic!("wrong format")
    };
    let workload = trace.workload(&SessionSelection {
        half,
        concurrency: 1,
        max_tokens: 10_000,
        seed: 1,
    });
    match workload {
        ReplayWorkload::Sessions { sessions, .. } => sessions,
        ReplayWorkload::Arrivals(_) => panic!("wrong workload"),
    }
}

#[test]
fn mooncake_blocks_are_split_and_shared() {
    let requests = arrivals(TraceHalf::All);
    assert_eq!(requests.len(), 3, "the long request is skipped");
    let prompts: Vec<Vec<u32>> = requests.iter().map(ReplayedRequest::tokens).collect();
    assert_eq!(prompts[0].len(), 1000);
    // 15 complete blocks of the first prompt are equal, and the rest differs.
    assert_eq!(prompts[0][..960], prompts[1][..960]);
    assert_ne!(prompts[0][960], prompts[1][960]);
    assert_eq!(prompts[0][0..128], [[1; 64], [2; 64]].concat());
    assert_eq!(prompts[2], [7 * 8 + 1; 64]);
    assert_eq!(requests[2].output_tokens, 1);
}

#[test]
fn mooncake_times_are_scaled_and_spread() {
    let requests = arrivals(TraceHalf::All);
    assert_eq!(requests[0].time_ms, 0.0);
    let spread = 1500.0 * 0.618_033_988_75;
    assert!((requests[1].time_ms - 1500.0 - spread).abs() < 1e-6);
    let second_half = arrivals(TraceHalf::Second);
    assert_eq!(second_half.len(), 1);
    assert!((second_half[0].time_ms - 1500.0 - spread).abs() < 1e-6);
}

#[test]
fn bursts_repeat_a_prompt() {
    let RecordedTrace::Mooncake(trace) = parse(MOONCAKE) else {
        panic!("wrong format")
    };
    let workload = trace.workload(&ArrivalSelection {
        half: TraceHalf::All,
        speed: 1.0,
        max_tokens: 10_000,
        end_ms: 60_000.0,
        burst_copies: 4,
    });
    let ReplayWorkload::Arrivals(requests) = workload else {
        panic!("wrong workload")
    };
    let burst = requests
        .iter()
        .filter(|request| request.input_tokens == 8000);
    let burst: Vec<&ReplayedRequest> = burst.collect();
    assert_eq!(burst.len(), 4);
    assert!(burst.iter().all(|one| one.tokens() == burst[0].tokens()));
    assert_eq!(burst[3].time_ms - burst[0].time_ms, 37.5);
}

#[test]
fn session_prompts_follow_kept_and_new_blocks() {
    let sessions = sessions(TraceHalf::All);
    let session = sessions.iter().find(|turns| turns[0].input_tokens == 200);
    let session = session.unwrap();
    let block = |turn: usize, number: usize| session[turn].tokens()[number * BLOCK_TOKENS];
    assert_eq!(session.len(), 3);
    assert_eq!(session[0].output_tokens, 2000, "answers are limited");
    assert_eq!(session[2].time_ms, 30_000.0, "think times are limited");
    assert_eq!(block(1, 1), block(0, 1));
    // Blocks 2 to 4 are the runs 3, 4 and 6.
    assert_eq!(block(1, 3), block(1, 2) + 1);
    assert_eq!(block(1, 4), block(1, 2) + 3);
    assert_eq!(session[2].tokens()[..320], session[1].tokens()[..320]);
}

#[test]
fn equal_tools_and_system_prompt_share_blocks() {
    let sessions = sessions(TraceHalf::All);
    let first = sessions[0][0].tokens();
    let second = sessions[1][0].tokens();
    assert_eq!(first[..128], second[..128]);
    assert_ne!(first[128], second[128]);
}

#[test]
fn halves_partition_the_sessions() {
    let first = sessions(TraceHalf::First);
    let second = sessions(TraceHalf::Second);
    assert_eq!(first.len() + second.len(), 2);
}

#[test]
fn unknown_format_is_an_error() {
    let error = RecordedTrace::parse(&[r#"{"prompt": "x"}"#.into()]);
    let error = error.err().unwrap().to_string();
    assert!(error.contains("unknown trace format"), "{error}");
}
