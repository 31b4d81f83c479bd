//! Lifetime of the child processes that tests start.

use super::*;

fn process_exists(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::test_kill_process(pid).is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_child_ends_even_if_stopped() {
    let gateway = EnvoyGateway::start(&[]).await;
    let pid = gateway.envoy.pid();
    assert!(gateway.envoy.is_running() && process_exists(pid));
    gateway.envoy.freeze();
    drop(gateway);
    assert!(!process_exists(pid));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_envoy_start_reports_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let error = envoy::start("static_resources: {nonsense: 1}", dir.path(), 1)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("envoy ended before it was ready") && error.contains("nonsense"),
        "{error}"
    );
}

#[test]
fn child_that_ignores_sigterm_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"]);
    let child = ChildProcess::spawn("deaf", &command, dir.path()).unwrap();
    let deadline = Instant::now() + SOON;
    while child.log_tail() != "deaf" && Instant::now() < deadline {
        std::thread::yield_now();
    }
    child.terminate();
    assert_eq!(
        child.wait_exit(Instant::now() + Duration::from_millis(200)),
        None
    );
    let pid = child.pid();
    drop(child);
    assert!(!process_exists(pid));
}

/// Not a test: the parent process that `children_end_with_killed_parent` starts and kills. Returns
/// at once if `PARENT_RUN_DIR` is not set.
#[test]
#[ignore = "run by children_end_with_killed_parent"]
fn parent_waits_to_be_killed() {
    #[expect(
        clippy::disallowed_methods,
        reason = "libtest takes no arguments for a test"
    )]
    let Some(dir) = std::env::var_os("PARENT_RUN_DIR") else {
        return;
    };
    let mut command = std::process::Command::new("sleep");
    let child = ChildProcess::spawn("grandchild", command.arg("600"), Path::new(&dir)).unwrap();
    fs::write(Path::new(&dir).join("new"), child.pid().to_string()).unwrap();
    fs::rename(Path::new(&dir).join("new"), Path::new(&dir).join("pid")).unwrap();
    child.wait_exit(Instant::now() + Duration::from_secs(60));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn children_end_with_killed_parent() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "config::processes::parent_waits_to_be_killed",
            "--ignored",
        ])
        .env("PARENT_RUN_DIR", dir.path());
    let parent = ChildProcess::spawn("parent", &command, dir.path()).unwrap();
    let file = dir.path().join("pid");
    assert!(
        until(SOON, async || file.exists()).await,
        "{}",
        parent.log_tail()
    );
    let grandchild: u32 = fs::read_to_string(&file).unwrap().parse().unwrap();
    assert!(process_exists(grandchild));
    parent.kill9();
    // The process is a zombie until its new parent reaps it.
    let is_dead = async || {
        let stat = fs::read_to_string(format!("/proc/{grandchild}/stat"));
        !stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    assert!(until(SOON, is_dead).await);
}
