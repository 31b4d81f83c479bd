//! Checks that no URL contains a password.

use warmroute_settings::{PathStep, Problem, has_credentials};

use super::steps;
use crate::config::Config;

/// Returns a problem for each URL that contains a password.
pub(super) fn credentials(config: &Config) -> Vec<Problem> {
    let mut urls: Vec<(Vec<PathStep>, &str)> = Vec::new();
    if let Some(url) = config
        .envoy
        .as_ref()
        .and_then(|envoy| envoy.admin_url.as_deref())
    {
        urls.push((steps("envoy.admin_url"), url));
    }
    if let Some(cache) = &config.index.shared_cache {
        urls.push((steps("index.shared_cache.url"), &cache.url));
    }
    for (at, url) in config
        .index
        .remote
        .iter()
        .flat_map(|remote| remote.servers.iter().enumerate())
    {
        let mut path = steps("index.remote.servers");
        path.push(at.into());
        urls.push((path, url));
    }
    if let Some(url) = config
        .index
        .warm_start
        .as_ref()
        .and_then(|warm_start| warm_start.url.as_deref())
    {
        urls.push((steps("index.warm_start.url"), url));
    }
    for (at, model) in config.models.iter().enumerate() {
        for (index, url) in model
            .remote_tokenizer
            .iter()
            .flat_map(|tokens| tokens.urls.iter().enumerate())
        {
            urls.push((
                vec![
                    "models".into(),
                    at.into(),
                    "remote_tokenizer".into(),
                    "urls".into(),
                    index.into(),
                ],
                url,
            ));
        }
    }
    let text = "an address is shown on pages and in the log, so it may not hold a password; write it without `user:password@`";
    urls.into_iter()
        .filter(|(_, url)| has_credentials(url))
        .map(|(path, _)| Problem::at(path, text))
        .collect()
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
