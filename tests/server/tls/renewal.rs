//! Certificates that are replaced at run time.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::clients::client;
use crate::support::pki::TestAuthority;
use crate::tls::site::{TlsCaller, TlsSite, serial, until};

const APPLIED: &str = "tls_reloads_total{listener=\"ext_proc\",outcome=\"applied\"}";
const INVALID: &str = "tls_reloads_total{listener=\"ext_proc\",outcome=\"invalid\"}";

fn config(tls: &Value) -> Value {
    json!({"listeners": {"ext_proc": {"address": "127.0.0.1:0", "tls": tls}}})
}

/// Replaces both files, each by a rename.
fn replace(directory: &Path, authority: &TestAuthority, number: u64) {
    let next = directory.join("next");
    authority.sign(number).write(&next);
    for name in ["tls.key", "tls.crt"] {
        fs::rename(next.join(name), directory.join(name)).unwrap();
    }
}

#[tokio::test]
async fn new_connections_use_renewed_certificate() {
    let authority = TestAuthority::new("ours");
    let site = TlsSite::start(config(&json!({"cert_dir": "certs"})), |directory| {
        authority.sign(1).write(&directory.join("certs"));
    })
    .await;
    let trusting = || client(Some(&authority), None, "h2");
    let old = TlsCaller::new(site.ext_proc, trusting()).await;
    until("served", async || old.is_served().await.unwrap()).await;
    assert_eq!(serial(site.ext_proc, trusting()).await, 1);
    replace(&site.path("certs"), &authority, 2);
    until("the second", async || {
        serial(site.ext_proc, trusting()).await == 2
    })
    .await;
    let handshakes = "tls_handshakes_total{listener=\"ext_proc\",outcome=\"done\"}";
    let before = site.metric(handshakes).await;
    assert!(old.is_served().await.unwrap());
    assert_eq!(
        site.metric(handshakes).await,
        before,
        "the old connection still works"
    );

    // The broken file has no effect: the second certificate stays in use. The next valid file takes
    // effect.
    fs::write(site.path("certs/tls.crt"), "broken").unwrap();
    until("refused", async || site.metric(INVALID).await >= 1.0).await;
    assert_eq!(serial(site.ext_proc, trusting()).await, 2);
    replace(&site.path("certs"), &authority, 3);
    until("the third", async || {
        serial(site.ext_proc, trusting()).await == 3
    })
    .await;
    assert_eq!(site.metric(APPLIED).await, 2.0);
    assert!(old.is_served().await.unwrap());
    site.stop().await;
}

#[tokio::test]
async fn mounted_secret_swap_is_detected() {
    let authority = TestAuthority::new("ours");
    let version = |directory: &Path, name: &str, number: u64| {
        authority.sign(number).write(&directory.join(name))
    };
    let site = TlsSite::start(config(&json!({"cert_dir": "certs"})), |directory| {
        let directory = directory.join("certs");
        version(&directory, "..v1", 1);
        symlink("..v1", directory.join("..data")).unwrap();
        for name in ["tls.crt", "tls.key"] {
            symlink(format!("..data/{name}"), directory.join(name)).unwrap();
        }
    })
    .await;
    let trusting = || client(Some(&authority), None, "h2");
    assert_eq!(serial(site.ext_proc, trusting()).await, 1);
    version(&site.path("certs"), "..v2", 2);
    symlink("..v2", site.path("certs/..data_tmp")).unwrap();
    fs::rename(site.path("certs/..data_tmp"), site.path("certs/..data")).unwrap();
    fs::remove_dir_all(site.path("certs/..v1")).unwrap();
    until("the second", async || {
        serial(site.ext_proc, trusting()).await == 2
    })
    .await;
    assert_eq!(
        (site.metric(APPLIED).await, site.metric(INVALID).await),
        (1.0, 0.0),
        "the swap is applied in one step"
    );
    site.stop().await;
}

#[tokio::test]
async fn client_ca_reload_applies_immediately() {
    let servers = TestAuthority::new("servers");
    let before = TestAuthority::new("before");
    let after = TestAuthority::new("after");
    let site = TlsSite::start(
        config(&json!({"cert_dir": "certs", "client_ca": "clients.pem"})),
        |directory| {
            servers.sign(1).write(&directory.join("certs"));
            fs::write(directory.join("clients.pem"), &before.cert).unwrap();
        },
    )
    .await;
    let of = |authority: &TestAuthority| client(Some(&servers), Some(&authority.sign(7)), "h2");
    let old = TlsCaller::new(site.ext_proc, of(&before)).await;
    let new = TlsCaller::new(site.ext_proc, of(&after)).await;
    until("served", async || old.is_served().await.unwrap()).await;
    assert!(new.is_served().await.is_err());
    fs::write(site.path("clients.pem"), &after.cert).unwrap();
    site.secrets.reload();
    until("a client of the new authority is served", async || {
        new.is_served().await.is_ok_and(|served| served)
    })
    .await;
    assert!(
        old.is_served().await.unwrap(),
        "existing connections stay open"
    );
    let refused = TlsCaller::new(site.ext_proc, of(&before)).await;
    assert!(refused.is_served().await.is_err());
    site.stop().await;
}
