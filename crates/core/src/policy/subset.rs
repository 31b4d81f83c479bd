//! Endpoint subset that a gateway allows for one request. Gateways write endpoints in several
//! forms: with or without ports, IPv4 plain or mapped into IPv6. Forms that Envoy treats as equal
//! are equal here.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use crate::worker::WorkerEndpoint;

/// Set of single endpoints, and of addresses with all their ports. The default admits none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct EndpointSubset {
    endpoints: BTreeSet<WorkerEndpoint>,
    addresses: BTreeSet<IpAddr>,
    unreadable: usize,
}

impl EndpointSubset {
    /// Parses list entries, which may contain several endpoints separated by commas. Invalid
    /// entries admit none.
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
            self.endpoints.insert(WorkerEndpoint(endpoint).canonical());
        } else if let Ok(address) = address.parse::<IpAddr>() {
            self.addresses.insert(address.to_canonical());
        } else {
            self.unreadable += 1;
        }
    }

    /// Returns whether an endpoint is allowed.
    pub fn contains(&self, endpoint: WorkerEndpoint) -> bool {
        let endpoint = endpoint.canonical();
        self.endpoints.contains(&endpoint) || self.addresses.contains(&endpoint.0.ip())
    }

    /// Returns whether no endpoint is allowed.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty() && self.addresses.is_empty()
    }

    /// Returns the number of entries that could not be parsed.
    pub fn unreadable(&self) -> usize {
        self.unreadable
    }
}

impl FromIterator<WorkerEndpoint> for EndpointSubset {
    fn from_iter<I: IntoIterator<Item = WorkerEndpoint>>(endpoints: I) -> Self {
        Self {
            endpoints: endpoints
                .into_iter()
                .map(WorkerEndpoint::canonical)
                .collect(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(entries: &[&str], endpoint: &str) -> bool {
        EndpointSubset::parse(entries.iter().copied()).contains(endpoint.parse().unwrap())
    }

    #[test]
    fn entries_match_endpoints_in_every_notation() {
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
    fn invalid_entries_are_counted_and_admit_none() {
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
            let subset = EndpointSubset::parse(entries.iter().copied());
            assert_eq!(
                (subset.unreadable(), subset.is_empty()),
                (unreadable, empty),
                "{entries:?}"
            );
        }
    }
}
