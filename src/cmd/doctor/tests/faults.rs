//! Faults of the shipped Envoy files and of their configurations of warmroute, one at a time.

mod clusters;
mod filters;
mod routes;

use super::*;
use FindingLevel::{Error, Warning};

/// Configuration dump of Envoy, and the configuration of warmroute.
struct ConfigPair {
    envoy: Value,
    warmroute: Value,
}

impl ConfigPair {
    fn listener(&mut self) -> &mut Value {
        &mut items(&mut self.envoy, "static_listeners")[0]["listener"]
    }

    fn manager(&mut self) -> &mut Value {
        &mut self.listener()["filter_chains"][0]["filters"][0]["typed_config"]
    }

    fn filters(&mut self) -> &mut Vec<Value> {
        self.manager()["http_filters"].as_array_mut().unwrap()
    }

    fn filter(&mut self, name: &str) -> &mut Value {
        let mut filters = self.filters().iter_mut();
        let found = filters.find(|filter| filter["name"] == name);
        &mut found.unwrap()["typed_config"]
    }

    fn main(&mut self) -> &mut Value {
        self.filter("envoy.filters.http.ext_proc")
    }

    fn modes(&mut self) -> &mut Value {
        &mut self.main()["processing_mode"]
    }

    fn probe(&mut self) -> &mut Value {
        self.filter("first_token_probe")
    }

    fn host(&mut self) -> &mut Value {
        virtual_host(&mut self.envoy)
    }

    fn action(&mut self) -> &mut Value {
        &mut self.host()["routes"][0]["route"]
    }

    fn cluster(&mut self, name: &str) -> &mut Value {
        cluster(&mut self.envoy, name)
    }

    fn policy(&mut self) -> &mut Value {
        let policy = &mut self.cluster("workers")["load_balancing_policy"]["policies"][0];
        &mut policy["typed_extension_config"]["typed_config"]
    }
}

/// A fault in one of the configurations, with the expected findings and a part of a fix.
#[derive(Clone, Copy)]
struct EnvoyFault {
    name: &'static str,
    file: &'static str,
    plant: fn(&mut ConfigPair),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
}

const fn standalone(
    name: &'static str,
    plant: fn(&mut ConfigPair),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
) -> EnvoyFault {
    EnvoyFault {
        name,
        file: "standalone",
        plant,
        expected,
        words,
    }
}

const fn in_file(file: &'static str, fault: EnvoyFault) -> EnvoyFault {
    EnvoyFault { file, ..fault }
}

fn assert_faults_found(faults: &[EnvoyFault]) {
    for fault in faults {
        let mut configs = ConfigPair {
            envoy: page(fault.file),
            warmroute: config(fault.file),
        };
        (fault.plant)(&mut configs);
        let found = findings(&configs.envoy, &configs.warmroute);
        let mut expected = fault.expected.to_vec();
        expected.sort_unstable();
        let mut wrong = problems(&found);
        wrong.retain(|(level, _)| *level <= Warning);
        wrong.sort_unstable();
        assert_eq!(wrong, expected, "{}: {found:#?}", fault.name);
        let mut fixes = found.iter().filter_map(|one| one.fix.as_deref());
        assert!(
            fixes.any(|fix| fix.contains(fault.words)),
            "{}: {found:#?}",
            fault.name
        );
    }
}

#[test]
fn filter_faults_are_found_with_fixes() {
    assert_faults_found(filters::FILTER_FAULTS);
}

#[test]
fn probe_faults_are_found_with_fixes() {
    assert_faults_found(filters::PROBE_FAULTS);
}

#[test]
fn cluster_faults_are_found_with_fixes() {
    assert_faults_found(clusters::CLUSTER_FAULTS);
}

#[test]
fn route_faults_are_found_with_fixes() {
    assert_faults_found(routes::ROUTE_FAULTS);
}
