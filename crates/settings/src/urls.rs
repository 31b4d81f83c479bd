//! Checks of URLs in settings.

/// Returns whether a URL contains a user name or a password. Such URLs are rejected, because URLs
/// appear on status pages and in logs.
pub fn has_credentials(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    authority.contains('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_found_in_the_authority_only() {
        for (url, found) in [
            ("http://10.0.0.7:8080/lookup", false),
            ("http://user:secret@10.0.0.7:8080/lookup", true),
            ("https://token@host", true),
            ("nats://a:b@nats:4222", true),
            ("user:secret@host:80", true),
            ("http://host/a@b?c=d@e", false),
            ("http://host?x=a@b", false),
        ] {
            assert_eq!(has_credentials(url), found, "{url}");
        }
    }
}
