//! Child processes that end with the value that owns them. They also end with their parent, even if
//! it is killed.
//!
//! Dropping a [`ChildProcess`] ends the process. If the parent is killed (`kill -9`, abort),
//! nothing is dropped, but the kernel sends the process a death signal. `setpriv` requests this
//! signal, because doing so between fork and exec would need unsafe code. The kernel sends the
//! signal when the *thread* that started the process ends, not only when the parent process does.
//! Each process is therefore started by a dedicated thread that waits for it. Without `setpriv`
//! (not Linux), only dropping ends the process.

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

/// Time for a graceful exit before the process is killed.
const GRACE: Duration = Duration::from_secs(2);
/// Number of final log lines shown on failure.
const TAIL_LINES: usize = 30;

/// A running process with its output in a log file; dropping it ends the process.
#[derive(Debug)]
pub struct ChildProcess {
    name: String,
    pid: Pid,
    log: PathBuf,
    exit: Arc<ExitState>,
}

/// The exit status, once there is one. A process is reaped under this lock. While a caller holds
/// the lock and finds no status, the process id cannot be reused, so a signal cannot reach another
/// process.
#[derive(Debug, Default)]
struct ExitState {
    status: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl ChildProcess {
    /// Starts `command` with both outputs redirected to `<run_dir>/<name>.log` and no input.
    ///
    /// Program, arguments, environment and directory are those of `command`; its redirections are
    /// ignored. Because `setpriv` starts the program, a missing program may appear only as an exit
    /// with status 127.
    pub fn spawn(name: &str, command: &Command, run_dir: &Path) -> anyhow::Result<Self> {
        let log = run_dir.join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("cannot write {}", log.display()))?;
        let mut bound = bound_to_parent(command);
        // The process group is separate, so that Ctrl-C reaches only the parent, which ends its
        // children in order.
        bound
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);

        let exit = Arc::new(ExitState::default());
        let (started_tx, started_rx) = mpsc::channel();
        let watched_exit = Arc::clone(&exit);
        std::thread::Builder::new()
            .name(format!("{name} watch"))
            .spawn(move || watch(bound, &started_tx, &watched_exit))?;
        let started = started_rx
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

    /// Returns the name given at start.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns the path of the log file.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the last lines of the output, for failure messages.
    pub fn log_tail(&self) -> String {
        tail(&self.log)
    }

    /// Returns true if the process has not ended. A stopped process is running.
    pub fn is_running(&self) -> bool {
        self.exit.status.lock().is_none()
    }

    /// Sends a signal. Does nothing once the process has ended.
    pub fn signal(&self, signal: Signal) {
        let status = self.exit.status.lock();
        if status.is_none() {
            // The call fails only for an ended process, which the lock rules out, or for one that
            // changed its user.
            _ = kill_process(self.pid, signal);
        }
    }

    /// Stops the process until [`ChildProcess::thaw`] is called. Returns when none of its threads
    /// runs any longer. Sending the signal is not enough: on a busy machine, other threads continue
    /// until the thread that handles the signal is scheduled.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        // The kernel reports the stop when the last thread has stopped. The call fails if the
        // process has ended.
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(self.pid), stopped) {}
    }

    /// Continues a stopped process.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Requests a graceful exit.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Kills the process, like `kill -9`.
    pub fn kill9(&self) {
        self.signal(Signal::KILL);
    }

    /// Waits for the exit. Returns `None` if the process still runs at `deadline`.
    pub fn wait_exit(&self, deadline: Instant) -> Option<ExitStatus> {
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

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_log_tail(self);
        }
        self.terminate();
        // A stopped process would not handle the request.
        self.thaw();
        if self.wait_exit(Instant::now() + GRACE).is_none() {
            self.kill9();
            self.wait_exit(Instant::now() + GRACE);
        }
    }
}

/// Starts the process and waits for its end. The module documentation explains why one thread does
/// both.
fn watch(mut command: Command, started_tx: &mpsc::Sender<io::Result<Pid>>, exit: &ExitState) {
    let mut process = match command.spawn() {
        Ok(process) => process,
        Err(error) => {
            _ = started_tx.send(Err(error));
            return;
        }
    };
    let pid = Pid::from_child(&process);
    _ = started_tx.send(Ok(pid));
    // Waits without reaping, so that the process id stays reserved until the lock is held.
    while let Err(rustix::io::Errno::INTR) = waitid(
        WaitId::Pid(pid),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    ) {}
    let mut status = exit.status.lock();
    *status = Some(process.wait().unwrap_or_default());
    exit.changed.notify_all();
}

/// Returns the same command, modified so that the kernel kills it when the thread that starts it
/// ends.
fn bound_to_parent(command: &Command) -> Command {
    static HAS_SETPRIV: LazyLock<bool> = LazyLock::new(|| {
        let probe = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "true"])
            .output();
        probe.is_ok_and(|output| output.status.success())
    });
    // The death signal is set after the start. If the parent has already ended by then, the command
    // must not run.
    let unless_orphaned = r#"test "$PPID" = "$0" && exec "$@""#;
    let mut bound = if *HAS_SETPRIV {
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

/// Returns the last lines of a file, or the reason why it cannot be read.
pub fn tail(log: &Path) -> String {
    match fs::read(log) {
        Ok(bytes) => last_lines(&String::from_utf8_lossy(&bytes)),
        Err(error) => format!("(cannot read {}: {error})", log.display()),
    }
}

/// Returns the last lines of a text.
pub fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[expect(
    clippy::print_stderr,
    reason = "the log is in a run directory that no longer exists when the failure is read"
)]
fn print_log_tail(child: &ChildProcess) {
    eprintln!(
        "--- last lines of {} ({}) ---\n{}",
        child.name,
        child.pid(),
        child.log_tail()
    );
}
