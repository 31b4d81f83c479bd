use warmroute_core::worker::{BlockSize, WorkerId};

use super::*;

const PATH: &str = "workers.yaml";

fn state() -> WorkersFileState {
    let model = WorkerModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        uses_bootstrap: false,
    };
    WorkersFileState::new(PATH.into(), vec![model])
}

fn text(text: &str) -> io::Result<Vec<u8>> {
    Ok(text.as_bytes().to_vec())
}

const ONE: &str = "- {id: 1, endpoint: 10.0.0.1:80}";

#[test]
fn equivalent_list_is_unchanged() {
    let mut state = state();
    let WorkersFileUpdate::Applied(workers) = state.apply(text(ONE)) else {
        panic!()
    };
    assert_eq!(workers[0].id, WorkerId(1));
    let equivalent = "# a comment\n- endpoint: '10.0.0.1:80'\n  id: 1\n  model: m\n";
    assert_eq!(
        state.apply(text(equivalent)),
        WorkersFileUpdate::Unchanged { recovered: false }
    );
}

#[test]
fn unusable_file_is_reported_once_and_fleet_stays() {
    let mut state = state();
    state.apply(text(ONE));
    let missing = || Err(io::Error::from(io::ErrorKind::NotFound));
    let is_new = |update| match update {
        WorkersFileUpdate::Invalid { is_new, .. } => is_new,
        other => panic!("{other:?}"),
    };
    assert!(is_new(state.apply(text("- id: 1\n"))));
    assert!(!is_new(state.apply(text("- id: 1\n"))));
    assert!(is_new(state.apply(missing())));
    assert!(!is_new(state.apply(missing())));
    assert!(is_new(state.apply(text(""))));
    assert_eq!(
        state.apply(text(ONE)),
        WorkersFileUpdate::Unchanged { recovered: true }
    );
    assert_eq!(
        state.apply(text(ONE)),
        WorkersFileUpdate::Unchanged { recovered: false }
    );
}

#[test]
fn empty_fleet_must_be_explicit() {
    let mut state = state();
    assert!(matches!(
        state.apply(text("\n# nothing\n")),
        WorkersFileUpdate::Invalid { .. }
    ));
    assert_eq!(
        state.apply(text("[]")),
        WorkersFileUpdate::Applied(Vec::new())
    );
}
