//! What all formats share: reading a file case by case, comparing answers, and holding the deviations against their table.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A place where we mean to answer something else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Deviation {
    /// The case.
    pub(crate) case: &'static str,
    /// The place in it, as the check calls it.
    pub(crate) at: &'static str,
    /// What we answer, as JSON.
    pub(crate) ours: &'static str,
    /// What the file says, as JSON.
    pub(crate) theirs: &'static str,
    /// Why.
    pub(crate) reason: &'static str,
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            case, at, reason, ..
        } = self;
        write!(f, "{case}, {at}: {reason}")
    }
}

/// What became of one file.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) run: usize,
    pub(crate) passed: usize,
    /// The deviations that were met.
    pub(crate) deviations: Vec<Deviation>,
    /// Cases in the table of deviations that the file does not have.
    pub(crate) absent: BTreeSet<&'static str>,
    pub(crate) failures: Vec<String>,
}

impl Report {
    /// Cases that differ on purpose, and in nothing else.
    pub(crate) fn deviating(&self) -> usize {
        self.deviations
            .iter()
            .map(|deviation| deviation.case)
            .collect::<BTreeSet<_>>()
            .len()
    }
}

/// The comparisons of one case.
pub(crate) struct Check {
    allowed: Vec<Deviation>,
    met: Vec<Deviation>,
    failures: Vec<String>,
}

impl Check {
    /// Holds our answer against theirs.
    pub(crate) fn same(
        &mut self,
        at: impl fmt::Display,
        ours: impl Serialize,
        theirs: impl Serialize,
    ) {
        let at = at.to_string();
        let (ours, theirs) = (
            serde_json::to_value(ours).unwrap(),
            serde_json::to_value(theirs).unwrap(),
        );
        let meant = self.allowed.iter().find(|deviation| deviation.at == at);
        match meant {
            None if ours == theirs => {}
            None => self
                .failures
                .push(format!("{at}: we say {ours}, but it is {theirs}")),
            Some(_) if ours == theirs => self
                .failures
                .push(format!("{at}: does not differ any more")),
            Some(deviation) => {
                let meant = [deviation.ours, deviation.theirs]
                    .map(|text| serde_json::from_str::<Value>(text).unwrap());
                if [&ours, &theirs] == [&meant[0], &meant[1]] {
                    self.met.push(*deviation);
                } else {
                    self.failures.push(format!(
                        "{at}: we say {ours} and it is {theirs}, not as the deviation has it"
                    ));
                }
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    case_count: usize,
    cases: Vec<Value>,
    #[serde(rename = "notes")]
    _notes: Value,
    #[serde(rename = "source")]
    _source: String,
}

/// Runs all cases of a file: `name` says what a case is called, `check` compares.
pub(crate) fn run_cases<C: DeserializeOwned>(
    text: &str,
    table: &[Deviation],
    name: impl Fn(&C) -> String,
    check: impl Fn(C, &mut Check),
) -> Report {
    let mut report = Report {
        absent: table.iter().map(|deviation| deviation.case).collect(),
        ..Report::default()
    };
    let file: File = match serde_json::from_str(text) {
        Ok(file) => file,
        Err(problem) => {
            report.failures.push(format!("cannot be read: {problem}"));
            return report;
        }
    };
    if file.cases.len() != file.case_count {
        report.failures.push(format!(
            "says it has {} cases and has {}",
            file.case_count,
            file.cases.len()
        ));
    }
    let mut names = BTreeSet::new();
    for (at, case) in file.cases.into_iter().enumerate() {
        report.run += 1;
        // Also where it cannot be read, it should be called by its name.
        let called = case["description"]
            .as_str()
            .map_or_else(|| format!("case {at}"), str::to_owned);
        let case: C = match serde_json::from_value(case) {
            Ok(case) => case,
            Err(problem) => {
                report.failures.push(format!("{called}: {problem}"));
                continue;
            }
        };
        let called = name(&case);
        if !names.insert(called.clone()) {
            report
                .failures
                .push(format!("{called}: two cases have this name"));
        }
        run_case(&mut report, table, &called, |comparisons| {
            check(case, comparisons)
        });
    }
    report
}

fn run_case(report: &mut Report, table: &[Deviation], name: &str, check: impl FnOnce(&mut Check)) {
    let allowed: Vec<_> = table
        .iter()
        .filter(|deviation| deviation.case == name)
        .copied()
        .collect();
    report.absent.remove(name);
    let mut comparisons = Check {
        allowed,
        met: Vec::new(),
        failures: Vec::new(),
    };
    if let Err(panicked) = quietly(|| check(&mut comparisons)) {
        comparisons.failures.push(panicked);
    }
    let Check {
        allowed,
        met,
        mut failures,
    } = comparisons;
    let missed = allowed.iter().filter(|deviation| !met.contains(deviation));
    failures
        .extend(missed.map(|deviation| {
            format!("{}: is named as a deviation, but was not met", deviation.at)
        }));
    if failures.is_empty() && met.is_empty() {
        report.passed += 1;
    }
    report.deviations.extend(met);
    report.failures.extend(
        failures
            .into_iter()
            .map(|failure| format!("{name}: {failure}")),
    );
}

thread_local! {
    /// What a check said as it failed; `None` outside of checks.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs a check; if it panics, gives out what it said and where, instead of printing it.
fn quietly(check: impl FnOnce()) -> Result<(), String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panicked| {
            let heard =
                SAID.with_borrow_mut(|said| said.as_mut().map(|said| *said = panicked.to_string()));
            if heard.is_none() {
                usual(panicked);
            }
        }));
    });
    SAID.set(Some(String::new()));
    let ended = catch_unwind(AssertUnwindSafe(check));
    let said = SAID.take().unwrap_or_default();
    ended.map_err(|_| said)
}
