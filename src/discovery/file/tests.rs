use super::*;
use crate::worker::{BlockSize, WorkerId};

const PATH: &str = "workers.yaml";

fn follower() -> Follower {
    let model = ServedModel {
        name: "m".into(),
        block_size: BlockSize::new(16).unwrap(),
        meets: false,
    };
    Follower::new(PATH.into(), vec![model])
}

fn text(text: &str) -> io::Result<Vec<u8>> {
    Ok(text.as_bytes().to_vec())
}

const ONE: &str = "- {id: 1, endpoint: 10.0.0.1:80}";

#[test]
fn a_new_list_is_applied_and_the_same_list_in_other_words_is_unchanged() {
    let mut follower = follower();
    let Reading::Applied(workers) = follower.take(text(ONE)) else {
        panic!()
    };
    assert_eq!(workers[0].id, WorkerId(1));
    let in_other_words = "# a comment\n- endpoint: '10.0.0.1:80'\n  id: 1\n  model: m\n";
    assert_eq!(
        follower.take(text(in_other_words)),
        Reading::Unchanged { healed: false }
    );
}

#[test]
fn an_unusable_file_is_news_once_and_keeps_the_fleet_in_use() {
    let mut follower = follower();
    follower.take(text(ONE));
    let missing = || Err(io::Error::from(io::ErrorKind::NotFound));
    let news = |reading| match reading {
        Reading::Invalid { news, .. } => news,
        other => panic!("{other:?}"),
    };
    assert!(news(follower.take(text("- id: 1\n"))));
    assert!(!news(follower.take(text("- id: 1\n"))));
    assert!(news(follower.take(missing())));
    assert!(!news(follower.take(missing())));
    assert!(news(follower.take(text(""))));
    assert_eq!(
        follower.take(text(ONE)),
        Reading::Unchanged { healed: true }
    );
    assert_eq!(
        follower.take(text(ONE)),
        Reading::Unchanged { healed: false }
    );
}

#[test]
fn a_file_of_no_workers_has_to_say_so() {
    let mut follower = follower();
    assert!(matches!(
        follower.take(text("\n# nothing\n")),
        Reading::Invalid { .. }
    ));
    assert_eq!(follower.take(text("[]")), Reading::Applied(Vec::new()));
}
