//! The endpoints that a gateway allows for one request. Gateways write them in several ways: with ports or without, IPv4
//! as such or inside of IPv6; what is equal to Envoy has to be equal here.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use crate::worker::Endpoint;

/// Some endpoints: single ones, and every port of some addresses. The default is nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Subset {
    endpoints: BTreeSet<Endpoint>,
    addresses: BTreeSet<IpAddr>,
    unreadable: usize,
}

impl Subset {
    /// Reads the entries of a list, or texts with commas between entries. What cannot be read allows nobody.
    pub fn parse<'a>(entries: impl IntoIterator<Item = &'a str>) -> Self {
        let mut subset = Self::default();
        let entries = entries
            .into_iter()
            .flat_map(|text| text.split(','))
            .map(str::trim);
        entries
            .filter(|entry| !entry.is_empty())
            .for_each(|entry| subset.read(entry));
        subset
    }

    fn read(&mut self, entry: &str) {
        let address = entry
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .unwrap_or(entry);
        if let Ok(endpoint) = entry.parse::<SocketAddr>() {
            self.endpoints.insert(Endpoint(endpoint).canonical());
        } else if let Ok(address) = address.parse::<IpAddr>() {
            self.addresses.insert(address.to_canonical());
        } else {
            self.unreadable += 1;
        }
    }

    /// Whether an endpoint is allowed.
    pub fn contains(&self, endpoint: Endpoint) -> bool {
        let endpoint = endpoint.canonical();
        self.endpoints.contains(&endpoint) || self.addresses.contains(&endpoint.0.ip())
    }

    /// Whether nobody is allowed.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty() && self.addresses.is_empty()
    }

    /// How many entries could not be read.
    pub fn unreadable(&self) -> usize {
        self.unreadable
    }
}

impl FromIterator<Endpoint> for Subset {
    fn from_iter<I: IntoIterator<Item = Endpoint>>(endpoints: I) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Endpoint::canonical).collect(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(entries: &[&str], endpoint: &str) -> bool {
        Subset::parse(entries.iter().copied()).contains(endpoint.parse().unwrap())
    }

    #[test]
    fn entries_are_endpoints_or_addresses_however_they_are_written() {
        let cases: [(&[&str], &str, bool); 18] = [
            (&["10.0.0.1:80"], "10.0.0.1:80", true),
            (&["10.0.0.1:80"], "10.0.0.1:81", false),
            (&["10.0.0.1"], "10.0.0.1:81", true),
            (&["10.0.0.1"], "10.0.0.10:81", false),
            (&["10.0.0.1:80, 10.0.0.2"], "10.0.0.2:9", true),
            (&["10.0.0.1:80", " 10.0.0.2:80 "], "10.0.0.2:80", true),
            (&["10.0.0.1:80,,"], "10.0.0.1:80", true),
            (&["[::1]:80"], "[::1]:80", true),
            (&["[::1]:80"], "[::1]:81", false),
            (&["::1"], "[::1]:81", true),
            (&["[::1]"], "[::1]:81", true),
            (&["[0:0:0:0:0:0:0:1]:80"], "[::1]:80", true),
            (&["[::ffff:10.0.0.1]:80"], "10.0.0.1:80", true),
            (&["::ffff:10.0.0.1"], "10.0.0.1:80", true),
            (&["10.0.0.1:80"], "[::ffff:10.0.0.1]:80", true),
            (&["worker:80", "10.0.0.1"], "10.0.0.1:80", true),
            (&["worker:80"], "10.0.0.1:80", false),
            (&[], "10.0.0.1:80", false),
        ];
        for (entries, endpoint, expected) in cases {
            assert_eq!(
                allows(entries, endpoint),
                expected,
                "{entries:?} {endpoint}"
            );
        }
    }

    #[test]
    fn what_cannot_be_read_is_counted_and_allows_nobody() {
        let cases: [(&[&str], usize, bool); 5] = [
            (&[], 0, true),
            (&["", " , "], 0, true),
            (
                &["worker:80, 10.0.0.1:x,10.0.0.256", "[::1", ":80"],
                5,
                true,
            ),
            (&["10.0.0.1:99999", "10.0.0.1:80"], 1, false),
            (&["10.0.0.1"], 0, false),
        ];
        for (entries, unreadable, empty) in cases {
            let subset = Subset::parse(entries.iter().copied());
            assert_eq!(
                (subset.unreadable(), subset.is_empty()),
                (unreadable, empty),
                "{entries:?}"
            );
        }
    }
}
