//! Checks the fake API server with kubectl, which is independent of the client under test.

use serde_json::{Value, json};
use warmroute_testbed::debian::KUBECTL;

use super::{pod, pool};
use crate::support::api_server::{ApiServer, TOKEN};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn kubectl_reads_the_same_objects() {
    let server = ApiServer::start().await;
    let labels = json!({"app": "vllm"});
    server.put("inferencepools", pool("p", &labels, &[8000, 8001]));
    server.put("pods", pod("a", "10.0.0.1", &labels));
    server.put("pods", pod("b", "2001:db8::2", &labels));
    server.put("pods", pod("other", "10.0.0.3", &json!({"app": "other"})));
    let dir = tempfile::tempdir().unwrap();
    let run = async |token: &str, arguments: &[&str]| {
        let kubeconfig = dir.path().join("config");
        std::fs::write(&kubeconfig, server.kubeconfig(token).to_string()).unwrap();
        let mut command = tokio::process::Command::from(KUBECTL.command().unwrap());
        command
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg("--cache-dir")
            .arg(dir.path())
            .env("HOME", dir.path());
        command
            .args(["get", "-o", "json"])
            .args(arguments)
            .output()
            .await
            .unwrap()
    };
    let items = async |arguments: &[&str]| -> Vec<Value> {
        let output = run(TOKEN, arguments).await;
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let list: Value = serde_json::from_slice(&output.stdout).unwrap();
        list["items"].as_array().unwrap().clone()
    };
    let found = items(&["pods", "-l", "app=vllm"]).await;
    let names: Vec<&str> = found
        .iter()
        .map(|pod| pod["metadata"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["a", "b"]);
    let mut expected = pod("b", "2001:db8::2", &labels);
    expected["metadata"]["resourceVersion"] = found[1]["metadata"]["resourceVersion"].clone();
    assert_eq!(found[1], expected);
    let pools = items(&["inferencepools.inference.networking.k8s.io"]).await;
    assert_eq!(pools[0]["spec"], pool("p", &labels, &[8000, 8001])["spec"]);
    // kubectl must also report the expected errors.
    let refused = run("another-token", &["pods", "-l", "app=vllm"]).await;
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && stderr.contains("Unauthorized"),
        "{stderr}"
    );
    let refused = run(TOKEN, &["pods", "-l", "app=vllm", "--all-namespaces"]).await;
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && stderr.contains("Forbidden"),
        "{stderr}"
    );
}
