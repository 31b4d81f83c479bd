use warmroute_core::worker::{BlockSize, WorkerId};
use warmroute_metrics::OutcomeLabel;

use super::*;

const PATH: &str = "workers.yaml";

fn state() -> WorkersFileState {
    let model = WorkerModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        uses_bootstrap: false,
    };
    WorkersFileState::new(PATH.into(), vec![model], Arc::new(Metrics::new()))
}

fn text(text: &str) -> io::Result<Vec<u8>> {
    Ok(text.as_bytes().to_vec())
}

const ONE: &str = "- {id: 1, endpoint: 10.0.0.1:80}";

#[test]
fn unusable_file_changes_nothing() {
    let mut state = state();
    let workers = state.apply(text(ONE)).unwrap();
    assert_eq!(workers[0].id, WorkerId(1));
    assert_eq!(state.apply(text(ONE)), None);
    let missing = Err(io::Error::from(io::ErrorKind::NotFound));
    for unusable in [text("- id: 1\n"), missing, text("")] {
        assert_eq!(state.apply(unusable), None);
        assert!(!state.errors.is_empty());
    }
    let equivalent = "# a comment\n- endpoint: '10.0.0.1:80'\n  id: 1\n  model: m\n";
    assert_eq!(state.apply(text(equivalent)), None);
    assert!(state.errors.is_empty());
    let counts = ["applied", "unchanged", "invalid"].map(|outcome| {
        let reads = &state.metrics.workers.file_reloads;
        reads.get_or_create(&OutcomeLabel { outcome }).get()
    });
    assert_eq!(counts, [1, 2, 3]);
}

#[test]
fn empty_fleet_must_be_explicit() {
    let mut state = state();
    assert_eq!(state.apply(text("\n# nothing\n")), None);
    assert_eq!(state.apply(text("[]")), Some(Vec::new()));
}
