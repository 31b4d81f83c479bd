//! Checks that no URL contains a password.

use serde_json::Value;
use warmroute_settings::{PathStep, Problem, has_credentials};

use crate::config::Config;

const TEXT: &str = "an address is shown on pages and in the log, so it may not hold a password; \
    write it without `user:password@`";

/// Returns a problem for each URL that contains a password.
pub(super) fn credentials(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    find_credentials(&config.to_json(), &mut Vec::new(), &mut problems);
    problems
}

fn find_credentials(value: &Value, path: &mut Vec<PathStep>, problems: &mut Vec<Problem>) {
    let mut find_within = |step: PathStep, value: &Value| {
        path.push(step);
        find_credentials(value, path, problems);
        path.pop();
    };
    match value {
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                find_within(at.into(), item);
            }
        }
        Value::Object(entries) => {
            for (key, entry) in entries {
                find_within(key.as_str().into(), entry);
            }
        }
        Value::String(text) if is_url(text) && has_credentials(text) => {
            problems.push(Problem::at(path.clone(), TEXT));
        }
        _ => {}
    }
}

/// Returns whether a text is a URL, or begins like one without its scheme: with a user and a
/// password. Other texts, such as the values of template variables, may contain an address too.
fn is_url(text: &str) -> bool {
    let user = text.split('@').next().unwrap_or_default();
    user.contains(':') && !text.contains(char::is_whitespace)
}

/// Combines the problems. Other problems of a URL with a password are dropped, because their texts
/// would quote it.
pub(super) fn with_credentials_first(
    mut problems: Vec<Problem>,
    credentials: Vec<Problem>,
) -> Vec<Problem> {
    problems.retain(|problem| credentials.iter().all(|other| other.path != problem.path));
    problems.extend(credentials);
    problems
}
