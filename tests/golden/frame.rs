//! Shared code of all formats: running the cases of a file, comparing answers, and checking
//! deviations against their table.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Intended difference from the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GoldenDeviation {
    /// Name of the case.
    pub(crate) case: &'static str,
    /// Name of the compared field.
    pub(crate) at: &'static str,
    /// This router's answer as JSON.
    pub(crate) ours: &'static str,
    /// Answer of the reference as JSON.
    pub(crate) theirs: &'static str,
    /// Reason of the difference.
    pub(crate) reason: &'static str,
}

impl fmt::Display for GoldenDeviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            case, at, reason, ..
        } = self;
        write!(f, "{case}, {at}: {reason}")
    }
}

/// Result of one file.
#[derive(Debug, Default)]
pub(crate) struct CheckReport {
    pub(crate) run: usize,
    pub(crate) passed: usize,
    /// Listed deviations that occurred.
    pub(crate) deviations: Vec<GoldenDeviation>,
    /// Cases in the deviation table that the file does not contain.
    pub(crate) absent: BTreeSet<&'static str>,
    pub(crate) failures: Vec<String>,
}

impl CheckReport {
    /// Returns the number of cases that differ only as intended.
    pub(crate) fn deviating(&self) -> usize {
        self.deviations
            .iter()
            .map(|deviation| deviation.case)
            .collect::<BTreeSet<_>>()
            .len()
    }
}

/// Comparisons of one case.
pub(crate) struct CaseCheck {
    allowed: Vec<GoldenDeviation>,
    occurred: Vec<GoldenDeviation>,
    failures: Vec<String>,
}

impl CaseCheck {
    /// Compares the answer of this router with that of the reference.
    pub(crate) fn same(
        &mut self,
        at: impl fmt::Display,
        ours: impl Serialize,
        theirs: impl Serialize,
    ) {
        let at = at.to_string();
        let ours = serde_json::to_value(ours).unwrap();
        let theirs = serde_json::to_value(theirs).unwrap();
        let listed = self.allowed.iter().find(|deviation| deviation.at == at);
        match listed {
            None if ours == theirs => {}
            None => self.failures.push(format!(
                "{at}: the answer is {ours}, the reference has {theirs}"
            )),
            Some(_) if ours == theirs => self
                .failures
                .push(format!("{at}: the listed deviation no longer occurs")),
            Some(deviation) => {
                let listed = [deviation.ours, deviation.theirs]
                    .map(|text| serde_json::from_str::<Value>(text).unwrap());
                if [&ours, &theirs] == [&listed[0], &listed[1]] {
                    self.occurred.push(*deviation);
                } else {
                    self.failures.push(format!(
                        "{at}: the answer is {ours} and the reference has {theirs}, unlike the listed deviation"
                    ));
                }
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GoldenFile {
    case_count: usize,
    cases: Vec<Value>,
    #[serde(rename = "notes")]
    _notes: Value,
    #[serde(rename = "source")]
    _source: String,
}

/// Runs all cases of a file with `check`. `name` returns the name of a case.
pub(crate) fn run_cases<C: DeserializeOwned>(
    text: &str,
    table: &[GoldenDeviation],
    name: impl Fn(&C) -> String,
    check: impl Fn(C, &mut CaseCheck),
) -> CheckReport {
    let mut report = CheckReport {
        absent: table.iter().map(|deviation| deviation.case).collect(),
        ..CheckReport::default()
    };
    let file: GoldenFile = match serde_json::from_str(text) {
        Ok(file) => file,
        Err(problem) => {
            report.failures.push(format!("cannot be read: {problem}"));
            return report;
        }
    };
    if file.cases.len() != file.case_count {
        report.failures.push(format!(
            "case_count is {}, but the file has {} cases",
            file.case_count,
            file.cases.len()
        ));
    }
    let mut names = BTreeSet::new();
    for (at, case) in file.cases.into_iter().enumerate() {
        report.run += 1;
        // Used if the case cannot be parsed.
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

fn run_case(
    report: &mut CheckReport,
    table: &[GoldenDeviation],
    name: &str,
    check: impl FnOnce(&mut CaseCheck),
) {
    let allowed: Vec<_> = table
        .iter()
        .filter(|deviation| deviation.case == name)
        .copied()
        .collect();
    report.absent.remove(name);
    let mut comparisons = CaseCheck {
        allowed,
        occurred: Vec::new(),
        failures: Vec::new(),
    };
    if let Err(panicked) = quietly(|| check(&mut comparisons)) {
        comparisons.failures.push(panicked);
    }
    let CaseCheck {
        allowed,
        occurred,
        mut failures,
    } = comparisons;
    let missed = allowed
        .iter()
        .filter(|deviation| !occurred.contains(deviation));
    failures.extend(
        missed.map(|deviation| format!("{}: the listed deviation did not occur", deviation.at)),
    );
    if failures.is_empty() && occurred.is_empty() {
        report.passed += 1;
    }
    report.deviations.extend(occurred);
    report.failures.extend(
        failures
            .into_iter()
            .map(|failure| format!("{name}: {failure}")),
    );
}

thread_local! {
    /// Panic message of a failed check. `None` outside of checks.
    static PANIC_MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs a check. Returns the message and location of a panic instead of printing them.
fn quietly(check: impl FnOnce()) -> Result<(), String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panicked| {
            let recorded = PANIC_MESSAGE.with_borrow_mut(|message| {
                message
                    .as_mut()
                    .map(|message| *message = panicked.to_string())
            });
            if recorded.is_none() {
                usual(panicked);
            }
        }));
    });
    PANIC_MESSAGE.set(Some(String::new()));
    let ended = catch_unwind(AssertUnwindSafe(check));
    let message = PANIC_MESSAGE.take().unwrap_or_default();
    ended.map_err(|_| message)
}
