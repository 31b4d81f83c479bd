//! Requests reach exactly the chosen worker, and conversations stay on their warm worker.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;

use crate::support::deployment::{RoutedAnswer, TestDeployment, essay, fast};
use crate::support::model_file;

const ENGINES: [u64; 4] = [1, 2, 3, u64::MAX];
const SESSIONS: usize = 80;

/// Request format of a session. The sessions use all combinations.
#[derive(Clone, Copy, Debug)]
enum PromptForm {
    Chat,
    Text,
    TokenIds,
}

/// Conversation as the client has it.
struct ChatTurns {
    form: PromptForm,
    stream: bool,
    /// Pairs of role and text. Completions send the concatenated text.
    messages: Vec<(&'static str, String)>,
    engine: u64,
}

impl ChatTurns {
    fn new(number: usize) -> Self {
        let form = [PromptForm::Chat, PromptForm::Text, PromptForm::TokenIds][number % 3];
        Self {
            form,
            stream: (number / 3).is_multiple_of(2),
            messages: vec![("user", essay(number))],
            engine: 0,
        }
    }

    fn path(&self) -> &'static str {
        if matches!(self.form, PromptForm::Chat) {
            "/v1/chat/completions"
        } else {
            "/v1/completions"
        }
    }

    fn request(&self, tokenizer: &tokenizers::Tokenizer) -> Value {
        let text = || {
            self.messages
                .iter()
                .map(|(_, text)| text.as_str())
                .collect::<Vec<_>>()
                .join(" ")
        };
        let mut body = json!({"model": MODEL, "max_tokens": 4, "stream": self.stream});
        match self.form {
            PromptForm::Chat => {
                let message =
                    |(role, content): &(&str, String)| json!({"role": role, "content": content});
                body["messages"] = self.messages.iter().map(message).collect();
            }
            PromptForm::Text => body["prompt"] = json!(text()),
            PromptForm::TokenIds => {
                body["prompt"] = json!(tokenizer.encode(text(), true).unwrap().get_ids())
            }
        }
        if self.stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    }

    /// Appends the response and the next question.
    fn append_turn(&mut self, answered: &RoutedAnswer) {
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
        self.messages.push(("assistant", answer));
        self.messages
            .push(("user", format!("And then? {}", self.messages.len())));
        self.engine = answered.engine();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_reach_chosen_engines_and_sessions_stay_warm() {
    let deployment = TestDeployment::start(&ENGINES.map(fast)).await;
    let tokenizer = tokenizer();
    let mut sessions: Vec<ChatTurns> = (0..SESSIONS).map(ChatTurns::new).collect();
    let mut served: BTreeMap<u64, usize> = BTreeMap::new();

    // The first and last turns are concurrent, so load spreads the sessions. The turns in between
    // are sequential, so only the caches decide.
    for (turn, at_once) in [(1, 16), (2, 1), (3, 1), (4, 16)] {
        let deployment = &deployment;
        let tokenizer = &tokenizer;
        let query = async |session: &ChatTurns| {
            if at_once == 1 {
                deployment.idle().await;
            }
            let body = session.request(tokenizer);
            deployment.post(session.path(), &body).await
        };
        let answers: Vec<RoutedAnswer> = futures_util::stream::iter(&sessions)
            .map(query)
            .buffered(at_once)
            .collect()
            .await;
        for (session, answered) in sessions.iter_mut().zip(answers) {
            answered.assert_exact();
            *served.entry(answered.engine()).or_default() += 1;
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
            session.append_turn(&answered);
        }
        deployment.settle().await;
    }
    assert!(served.values().sum::<usize>() >= 300);
    assert_eq!(
        served.keys().copied().collect::<BTreeSet<_>>(),
        ENGINES.into(),
        "an engine served no request: {served:?}"
    );
}

/// Returns the tokenizer of the engines, loaded by the `tokenizers` library.
fn tokenizer() -> tokenizers::Tokenizer {
    let file = std::fs::File::open(model_file("tokenizer.json.gz")).unwrap();
    let mut json = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(file), &mut json).unwrap();
    tokenizers::Tokenizer::from_bytes(json).unwrap()
}
