use warmroute_core::worker::{BlockSize, WorkerId};

use super::*;

const PATH: &str = "workers.yaml";

fn follower() -> WorkersFileState {
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
    let mut follower = follower();
    let WorkersFileUpdate::Applied(workers) = follower.apply(text(ONE)) else {
        panic!()
    };
    assert_eq!(workers[0].id, WorkerId(1));
    let in_other_words = "# a comment\n- endpoint: '10.0.0.1:80'\n  id: 1\n  model: m\n";
    assert_eq!(
        follower.apply(text(in_other_words)),
        WorkersFileUpdate::Unchanged { healed: false }
    );
}

#[test]
fn unusable_file_is_reported_once_and_fleet_stays() {
    let mut follower = follower();
    follower.apply(text(ONE));
    let missing = || Err(io::Error::from(io::ErrorKind::NotFound));
    let news = |reading| match reading {
        WorkersFileUpdate::Invalid { news, .. } => news,
        other => panic!("{other:?}"),
    };
    assert!(news(follower.apply(text("- id: 1\n"))));
    assert!(!news(follower.apply(text("- id: 1\n"))));
    assert!(news(follower.apply(missing())));
    assert!(!news(follower.apply(missing())));
    assert!(news(follower.apply(text(""))));
    assert_eq!(
        follower.apply(text(ONE)),
        WorkersFileUpdate::Unchanged { healed: true }
    );
    assert_eq!(
        follower.apply(text(ONE)),
        WorkersFileUpdate::Unchanged { healed: false }
    );
}

#[test]
fn empty_fleet_must_be_explicit() {
    let mut follower = follower();
    assert!(matches!(
        follower.apply(text("\n# nothing\n")),
        WorkersFileUpdate::Invalid { .. }
    ));
    assert_eq!(
        follower.apply(text("[]")),
        WorkersFileUpdate::Applied(Vec::new())
    );
}
