//! Requests go exactly where warmroute says, and conversations stay where they are warm.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt as _;
use serde_json::{Value, json};

use crate::deployment::{Answered, Deployment, essay, fast};
use crate::support::stack::{MODEL, model_file};

const ENGINES: [u64; 4] = [1, 2, 3, u64::MAX];
const SESSIONS: usize = 80;

/// How one session talks; every combination occurs among the sessions.
#[derive(Clone, Copy, Debug)]
enum Form {
    Chat,
    Text,
    TokenIds,
}

/// A conversation as the client knows it.
struct Session {
    form: Form,
    stream: bool,
    /// Pairs of role and text, or the text in one piece.
    said: Vec<(&'static str, String)>,
    engine: String,
}

impl Session {
    fn new(number: usize) -> Self {
        let form = [Form::Chat, Form::Text, Form::TokenIds][number % 3];
        Self {
            form,
            stream: (number / 3).is_multiple_of(2),
            said: vec![("user", essay(number))],
            engine: String::new(),
        }
    }

    fn path(&self) -> &'static str {
        if matches!(self.form, Form::Chat) {
            "/v1/chat/completions"
        } else {
            "/v1/completions"
        }
    }

    fn request(&self, tokenizer: &tokenizers::Tokenizer) -> Value {
        let text = || {
            self.said
                .iter()
                .map(|(_, text)| text.as_str())
                .collect::<Vec<_>>()
                .join(" ")
        };
        let mut body = json!({"model": MODEL, "max_tokens": 4, "stream": self.stream});
        match self.form {
            Form::Chat => {
                let message =
                    |(role, content): &(&str, String)| json!({"role": role, "content": content});
                body["messages"] = self.said.iter().map(message).collect();
            }
            Form::Text => body["prompt"] = json!(text()),
            Form::TokenIds => {
                body["prompt"] = json!(tokenizer.encode(text(), true).unwrap().get_ids())
            }
        }
        if self.stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    }

    /// Notes the answer and asks on.
    fn go_on(&mut self, answered: &Answered) {
        let text = |document: &Value| {
            let choice = document["choices"].get(0)?;
            let places = ["/message/content", "/delta/content", "/text"];
            Some(
                places
                    .iter()
                    .find_map(|place| choice.pointer(place)?.as_str())?
                    .to_owned(),
            )
        };
        let answer: String = answered.documents().iter().filter_map(text).collect();
        assert!(!answer.is_empty(), "{answered:?}");
        self.said.push(("assistant", answer));
        self.said
            .push(("user", format!("And then? {}", self.said.len())));
        answered.engine().clone_into(&mut self.engine);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_arrives_at_the_engine_that_was_chosen_and_every_session_stays_warm() {
    let deployment = Deployment::start(&ENGINES.map(fast)).await;
    let tokenizer = tokenizer();
    let mut sessions: Vec<Session> = (0..SESSIONS).map(Session::new).collect();
    let mut served: BTreeMap<String, usize> = BTreeMap::new();

    // All at once, so that load spreads the sessions; then one by one, so that only the cache decides; then all at once.
    for (turn, at_once) in [(1, 16), (2, 1), (3, 1), (4, 16)] {
        let (deployment, tokenizer) = (&deployment, &tokenizer);
        let ask = async |session: &Session| {
            if at_once == 1 {
                deployment.idle().await;
            }
            Answered::read(
                deployment
                    .post(session.path(), &session.request(tokenizer))
                    .await,
            )
            .await
        };
        let answers: Vec<Answered> = futures_util::stream::iter(&sessions)
            .map(ask)
            .buffered(at_once)
            .collect()
            .await;
        for (session, answered) in sessions.iter_mut().zip(answers) {
            answered.assert_exact();
            *served.entry(answered.engine().to_owned()).or_default() += 1;
            if at_once == 1 {
                assert_eq!(
                    answered.engine(),
                    session.engine,
                    "turn {turn} of {:?}",
                    session.form
                );
                assert!(
                    answered.cached_tokens() > 100,
                    "turn {turn} of {:?}: {answered:?}",
                    session.form
                );
                assert_eq!(
                    answered.predicted(),
                    Some(answered.cached_tokens()),
                    "turn {turn} of {:?}",
                    session.form
                );
            }
            session.go_on(&answered);
        }
        deployment.settle().await;
    }
    assert!(served.values().sum::<usize>() >= 300);
    let known: BTreeSet<String> = ENGINES.iter().map(ToString::to_string).collect();
    assert_eq!(
        served.keys().cloned().collect::<BTreeSet<_>>(),
        known,
        "every engine takes part: {served:?}"
    );
}

/// The engines' own tokenizer, read here a third time and by the library alone.
fn tokenizer() -> tokenizers::Tokenizer {
    let file = std::fs::File::open(model_file("tokenizer.json.gz")).unwrap();
    let mut json = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(file), &mut json).unwrap();
    tokenizers::Tokenizer::from_bytes(json).unwrap()
}
