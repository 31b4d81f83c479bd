//! Parsers of argument values.

use std::net::SocketAddr;

use warmroute_settings::has_credentials;

/// Parses a URL with a scheme.
pub(super) fn parse_url(url: &str) -> Result<String, String> {
    let has_scheme = url.starts_with("http://") || url.starts_with("https://");
    if !has_scheme {
        return Err("expected a URL, for example http://127.0.0.1:9900".to_owned());
    }
    check_authority(url)?;
    Ok(url.to_owned())
}

/// Parses the address of the admin pages: a URL, or HOST:PORT for plain HTTP.
pub(super) fn parse_admin_url(text: &str) -> Result<String, String> {
    if text.contains("://") {
        return parse_url(text);
    }
    check_authority(text)?;
    let has_port = text
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if has_port {
        Ok(format!("http://{text}"))
    } else {
        Err("expected a URL or HOST:PORT, for example http://127.0.0.1:9005".to_owned())
    }
}

/// Rejects credentials, and IPv6 addresses without brackets, whose port would be ambiguous.
fn check_authority(url: &str) -> Result<(), String> {
    if has_credentials(url) {
        return Err(
            "a user name or password in a URL is not accepted; admin pages accept --token-file"
                .to_owned(),
        );
    }
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.matches(':').count() > 1 && !authority.starts_with('[') {
        return Err("write an IPv6 address in brackets, for example http://[::1]:9005".to_owned());
    }
    Ok(())
}

/// Parses the address of an engine. Host names are resolved at run time, so they belong to `--dns`.
pub(super) fn parse_engine_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        let port = text.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        if matches!(port, Some(Ok(_))) && !text.starts_with('[') {
            format!("`{text}` is not an IP:PORT; for a host name, write --dns {text}")
        } else {
            "expected IP:PORT, for example 10.0.0.5:8000".to_owned()
        }
    })
}

/// Parses a price.
pub(super) fn parse_price(text: &str) -> Result<f64, String> {
    let price: f64 = text
        .parse()
        .map_err(|_| format!("`{text}` is not a number"))?;
    if price.is_finite() && price >= 0.0 {
        Ok(price)
    } else {
        Err("the price must be at least 0".to_owned())
    }
}

/// Parses a header, written `NAME: VALUE` or `NAME=VALUE`. The first separator counts.
pub(super) fn parse_header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text
        .split_once([':', '='])
        .ok_or("expected `NAME: VALUE` or NAME=VALUE")?;
    let name = name.trim();
    if name.is_empty() {
        Err("the header has no name".to_owned())
    } else {
        Ok((name.to_lowercase(), value.trim().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admin_address_becomes_a_url() {
        for (text, expected) in [
            ("127.0.0.1:9005", "http://127.0.0.1:9005"),
            (
                "warmroute.inference:9005",
                "http://warmroute.inference:9005",
            ),
            ("[::1]:9005", "http://[::1]:9005"),
            ("https://host:1", "https://host:1"),
        ] {
            assert_eq!(parse_admin_url(text).as_deref(), Ok(expected));
        }
        for text in ["host", ":9005", "host:port", "ftp://host:1"] {
            assert!(parse_admin_url(text).is_err(), "{text}");
        }
        for (text, part) in [
            ("::1:9005", "in brackets"),
            ("http://fd00::7:9005/", "in brackets"),
            ("http://admin:secret@host:9005", "--token-file"),
            ("admin:secret@host:9005", "--token-file"),
        ] {
            let error = parse_admin_url(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn host_name_of_engine_refers_to_dns() {
        assert_eq!(
            parse_engine_address("10.0.0.5:8000"),
            Ok(([10, 0, 0, 5], 8000).into())
        );
        let error = parse_engine_address("vllm:8000").unwrap_err();
        assert!(error.ends_with("write --dns vllm:8000"), "{error}");
        let error = parse_engine_address("10.0.0.5").unwrap_err();
        assert!(error.starts_with("expected IP:PORT"), "{error}");
    }

    #[test]
    fn header_accepts_colon_and_equals_sign() {
        let pair = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        assert_eq!(parse_header("Foo: bar=1"), pair("foo", "bar=1"));
        assert_eq!(parse_header("foo=bar: 1"), pair("foo", "bar: 1"));
        assert!(parse_header("foo").is_err() && parse_header(": x").is_err());
    }
}
