//! Command line of the suite, compatible with libtest: it accepts the flags that Cargo passes to
//! every test target.

/// Runs the cases against a real API server.
#[derive(Debug, clap::Parser)]
#[command(disable_version_flag = true)]
pub(crate) struct SuiteArguments {
    /// Runs only cases whose names contain one of these filters.
    filters: Vec<String>,
    /// Prints the names of the cases.
    #[arg(long)]
    pub(crate) list: bool,
    /// A filter must equal the whole name.
    #[arg(long)]
    exact: bool,
    /// Skips cases whose names contain this filter.
    #[arg(long)]
    skip: Vec<String>,
    /// Runs ignored cases only. The suite has none.
    #[arg(long)]
    ignored: bool,
    #[command(flatten)]
    _accepted: AcceptedFlags,
}

/// Flags of libtest that are accepted without an effect.
#[derive(Debug, clap::Args)]
struct AcceptedFlags {
    #[arg(long, hide = true)]
    include_ignored: bool,
    #[arg(long, hide = true, alias = "no-capture")]
    nocapture: bool,
    #[arg(long, hide = true)]
    show_output: bool,
    #[arg(long, hide = true)]
    test: bool,
    #[arg(long, hide = true)]
    bench: bool,
    #[arg(long, hide = true)]
    force_run_in_process: bool,
    #[arg(long, hide = true)]
    exclude_should_panic: bool,
    #[arg(long, hide = true)]
    shuffle: bool,
    #[arg(short, long, hide = true)]
    quiet: bool,
    #[arg(long, hide = true)]
    test_threads: Option<usize>,
    #[arg(long, hide = true)]
    color: Option<String>,
    #[arg(long, hide = true)]
    format: Option<String>,
    #[arg(long, hide = true)]
    logfile: Option<String>,
    #[arg(long, hide = true)]
    shuffle_seed: Option<u64>,
    #[arg(long, hide = true)]
    report_time: bool,
    #[arg(long, hide = true)]
    ensure_time: bool,
    #[arg(short = 'Z', hide = true)]
    unstable: Vec<String>,
}

impl SuiteArguments {
    pub(crate) fn selects(&self, name: &str) -> bool {
        let matches = |filter: &String| {
            if self.exact {
                name == filter
            } else {
                name.contains(filter.as_str())
            }
        };
        let is_skipped = self.skip.iter().any(|skip| {
            if self.exact {
                name == skip
            } else {
                name.contains(skip)
            }
        });
        !self.ignored
            && !is_skipped
            && (self.filters.is_empty() || self.filters.iter().any(matches))
    }
}
