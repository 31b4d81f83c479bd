//! Child processes that end with the value that owns them, and with their parent even when it is killed.
//!
//! Dropping a [`Child`] ends the process. For the case that nothing is dropped (`kill -9`, abort), the process asks the
//! kernel for a death signal: by `setpriv`, because setting it ourselves between fork and exec needs unsafe code. That
//! signal is sent when the *thread* that started the process ends, not only when the parent does; so each process is
//! started by a thread of its own, which then waits for it and ends no sooner. Without `setpriv` (not Linux), only
//! dropping ends the process.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// How long a process may take to end after a polite request before it is killed.
const GRACE: Duration = Duration::from_secs(2);
/// How many of the last lines of a log are shown when something fails.
const TAIL_LINES: usize = 30;

/// A running process with its output in a log file; dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Child {
    name: String,
    pid: Pid,
    log: PathBuf,
    exit: Arc<Exit>,
}

/// The exit status, once there is one. A process is reaped under this lock, so that nobody who holds it and finds no
/// status can signal a stranger that was given the same process id.
#[derive(Debug, Default)]
struct Exit {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Child {
    /// Starts `command` with both outputs going to `<run_dir>/<name>.log` and no input.
    ///
    /// Program, arguments, environment and directory are taken from `command`; its own redirections are not. A program
    /// that does not exist may show only as an early end with status 127, because it is started by way of `setpriv`.
    pub(crate) fn spawn(name: &str, command: &Command, run_dir: &Path) -> anyhow::Result<Self> {
        let log = run_dir.join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("cannot write {}", log.display()))?;
        let mut bound = bound_to_parent(command);
        // A group of its own: Ctrl-C is for the parent, which then ends its children in its own order.
        bound
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);

        let exit = Arc::new(Exit::default());
        let (started, start) = mpsc::channel();
        let reaped = Arc::clone(&exit);
        std::thread::Builder::new()
            .name(format!("{name} watch"))
            .spawn(move || watch(bound, &started, &reaped))?;
        let started = start
            .recv()
            .context("the thread that starts processes died")?;
        let pid =
            started.with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self {
            name: name.to_owned(),
            pid,
            log,
            exit,
        })
    }

    /// The name given at start.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// The file that has the output.
    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// The last lines of the output, for messages about failures.
    pub(crate) fn log_tail(&self) -> String {
        tail(&self.log)
    }

    /// Whether the process has not ended yet; a stopped one is running.
    pub(crate) fn is_running(&self) -> bool {
        self.exit.status.lock().is_none()
    }

    /// Sends a signal; does nothing once the process has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        let status = self.exit.status.lock();
        if status.is_none() {
            // Fails only for a process that is gone, which the lock rules out, or that took other rights.
            _ = kill_process(self.pid, signal);
        }
    }

    /// Stops the process where it is, until [`Child::thaw`], and returns when none of its threads runs any longer. A signal
    /// alone is only on its way when it was sent: on a busy machine other threads work on until the one that takes it has a
    /// turn.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        // The kernel tells the parent once the last thread has stopped. It fails where the process has ended.
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(self.pid), stopped) {}
    }

    /// Lets a frozen process go on.
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Asks the process to end.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends the process without asking, as `kill -9` does.
    pub(crate) fn kill9(&self) {
        self.signal(Signal::KILL);
    }

    /// Waits until the process has ended; `None` if it still runs at `deadline`.
    pub(crate) fn wait_exit(&self, deadline: Instant) -> Option<ExitStatus> {
        let mut status = self.exit.status.lock();
        while status.is_none() {
            if self
                .exit
                .changed
                .wait_until(&mut status, deadline)
                .timed_out()
            {
                break;
            }
        }
        *status
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if std::thread::panicking() {
            show_tail(self);
        }
        self.terminate();
        // A frozen process would keep the request to itself.
        self.thaw();
        if self.wait_exit(Instant::now() + GRACE).is_none() {
            self.kill9();
            self.wait_exit(Instant::now() + GRACE);
        }
    }
}

/// Starts the process and stays until it has ended: see the module's text for why one thread does both.
fn watch(mut command: Command, started: &mpsc::Sender<io::Result<Pid>>, exit: &Exit) {
    let mut process = match command.spawn() {
        Ok(process) => process,
        Err(error) => {
            _ = started.send(Err(error));
            return;
        }
    };
    let pid = Pid::from_child(&process);
    _ = started.send(Ok(pid));
    // Waits without reaping, so that the process id stays taken until the lock is held.
    while let Err(rustix::io::Errno::INTR) = waitid(
        WaitId::Pid(pid),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    ) {}
    let mut status = exit.status.lock();
    *status = Some(process.wait().unwrap_or_default());
    exit.changed.notify_all();
}

/// The same command, killed by the kernel when the thread that starts it ends.
fn bound_to_parent(command: &Command) -> Command {
    static HAVE_SETPRIV: LazyLock<bool> = LazyLock::new(|| {
        let probe = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "true"])
            .output();
        probe.is_ok_and(|output| output.status.success())
    });
    // The signal is asked for after the start, when the parent may be gone already: then there is nothing to run for.
    let unless_orphaned = r#"test "$PPID" = "$0" && exec "$@""#;
    let mut bound = if *HAVE_SETPRIV {
        let mut setpriv = Command::new("setpriv");
        setpriv.args([
            "--pdeathsig",
            "KILL",
            "--",
            "sh",
            "-c",
            unless_orphaned,
            &std::process::id().to_string(),
        ]);
        setpriv.arg(command.get_program());
        setpriv
    } else {
        Command::new(command.get_program())
    };
    bound.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => bound.env(name, value),
            None => bound.env_remove(name),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        bound.current_dir(dir);
    }
    bound
}

/// The last lines of a file, or why they cannot be shown.
pub(crate) fn tail(log: &Path) -> String {
    match fs::read(log) {
        Ok(bytes) => last_lines(&String::from_utf8_lossy(&bytes)),
        Err(error) => format!("(cannot read {}: {error})", log.display()),
    }
}

/// The last lines of a text.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[expect(
    clippy::print_stderr,
    reason = "the log lies in a run directory that is gone when the failure is read"
)]
fn show_tail(child: &Child) {
    eprintln!(
        "--- last lines of {} ({}) ---\n{}",
        child.name,
        child.pid(),
        child.log_tail()
    );
}
