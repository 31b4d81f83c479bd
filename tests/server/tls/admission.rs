//! Clients that listeners accept or reject.

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use warmroute_testbed::ports::PATIENCE;

use crate::support::clients::{client, client_of};
use crate::support::pki::TestAuthority;
use crate::tls::site::{TlsCaller, TlsSite, dial, http, served, shown, until};

#[tokio::test]
async fn self_signed_certificate_serves_only_tls_clients() {
    let site = TlsSite::start(
        json!({
            "listeners": {"ext_proc": {"address": "127.0.0.1:0", "tls": {"self_signed": true}}},
        }),
        |_| (),
    )
    .await;
    until("ready", async || site.page("/readyz", "").await.0 == 200).await;
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let stream = dial(site.ext_proc, client_of(&[version], None, None, "h2"))
            .await
            .unwrap();
        let connection = stream.get_ref().1;
        assert_eq!(connection.protocol_version(), Some(version.version));
        assert_eq!(connection.alpn_protocol(), Some(&b"h2"[..]));
    }
    let caller = TlsCaller::new(site.ext_proc, client(None, None, "h2")).await;
    assert!(caller.is_served().await.unwrap());
    let cert = shown(site.ext_proc, client(None, None, "h2")).await;
    let (_, parsed) = x509_parser::parse_x509_certificate(&cert).unwrap();
    let series = "tls_certificate_expiry_timestamp_seconds{listener=\"ext_proc\"}";
    assert_eq!(
        site.metric(series).await,
        parsed.validity().not_after.timestamp() as f64
    );

    // The listener rejects plaintext, another ALPN protocol, and a client that verifies the
    // certificate.
    let plain = site.endpoint().connect_lazy();
    assert!(served(plain).await.is_err());
    assert!(
        dial(site.ext_proc, client(None, None, "http/1.1"))
            .await
            .is_err()
    );
    assert!(
        dial(
            site.ext_proc,
            client(Some(&TestAuthority::new("another")), None, "h2")
        )
        .await
        .is_err()
    );
    assert!(
        site.metric("tls_handshakes_total{listener=\"ext_proc\",outcome=\"failed\"}")
            .await
            >= 2.0
    );
    assert!(
        caller.is_served().await.unwrap(),
        "no other client is affected"
    );
    site.stop().await;
}

#[tokio::test]
async fn configured_certificate_is_verified_on_every_listener() {
    let authority = TestAuthority::new("ours");
    let listener = |tls| json!({"address": "127.0.0.1:0", "tls": tls});
    let more = json!({
        "listeners": {
            "ext_proc": {
                "address": "127.0.0.1:0",
                "tls": {"cert": "certs/tls.crt", "key": "certs/tls.key"},
            },
            "api": listener(json!({"cert_dir": "certs"})),
            "admin": listener(json!({"cert_dir": "certs"})),
        },
    });
    let site = TlsSite::start(more, |directory| {
        authority.sign(1).write(&directory.join("certs"))
    })
    .await;
    let mut callers = Vec::new();
    for address in [site.ext_proc, site.api.unwrap()] {
        let caller = TlsCaller::new(address, client(Some(&authority), None, "h2")).await;
        until("served", async || caller.is_served().await.unwrap()).await;
        callers.push(caller);
    }
    let page = dial(site.admin, client(Some(&authority), None, "http/1.1"))
        .await
        .unwrap();
    let (status, text) = http(page, "/metrics", "").await.unwrap();
    assert_eq!(status, 200);
    for listener in ["ext_proc", "api", "admin"] {
        assert!(
            text.contains(&format!(
                "warmroute_connections{{listener=\"{listener}\"}} 1"
            )),
            "{listener}: {text}"
        );
    }
    assert!(
        http(
            TcpStream::connect(site.admin).await.unwrap(),
            "/healthz",
            ""
        )
        .await
        .is_err(),
        "not in plaintext"
    );
    drop(callers);
    site.stop().await;
}

#[tokio::test]
async fn client_ca_admits_only_its_clients() {
    let servers = TestAuthority::new("servers");
    let clients = TestAuthority::new("clients");
    let others = TestAuthority::new("others");
    let tls = json!({"cert_dir": "certs", "client_ca": "clients.pem"});
    let more = json!({
        "listeners": {
            "ext_proc": {"address": "127.0.0.1:0", "tls": tls},
            "admin": {"address": "127.0.0.1:0", "tls": tls},
        },
    });
    let site = TlsSite::start(more, |directory| {
        servers.sign(1).write(&directory.join("certs"));
        std::fs::write(directory.join("clients.pem"), &clients.cert).unwrap();
    })
    .await;
    let right = clients.sign(2);
    let wrong = others.sign(3);
    let caller = TlsCaller::new(site.ext_proc, client(Some(&servers), Some(&right), "h2")).await;
    until("served", async || caller.is_served().await.unwrap()).await;
    for own in [None, Some(&wrong)] {
        let caller = TlsCaller::new(site.ext_proc, client(Some(&servers), own, "h2")).await;
        assert!(
            caller.is_served().await.is_err(),
            "with {:?}",
            own.map(|own| &own.cert)
        );
        // In TLS 1.3, a client detects the rejection only when it reads.
        let page = dial(site.admin, client(Some(&servers), own, "http/1.1")).await;
        let answer = match page {
            Ok(page) => http(page, "/healthz", "").await,
            Err(error) => Err(error),
        };
        assert!(answer.is_err(), "{answer:?}");
    }
    let page = dial(site.admin, client(Some(&servers), Some(&right), "http/1.1"))
        .await
        .unwrap();
    assert_eq!(http(page, "/metrics", "").await.unwrap().0, 200);
    site.stop().await;
}

#[tokio::test]
async fn token_protects_all_pages_but_probes() {
    let more = json!({"listeners": {"admin": {"address": "127.0.0.1:0", "token_file": "token"}}});
    let site = TlsSite::start(more, |directory| {
        std::fs::write(directory.join("token"), "first\n").unwrap()
    })
    .await;
    let with = |token: &str| format!("authorization: Bearer {token}\r\n");
    for page in [
        "/metrics",
        "/debug/fleet",
        "/debug/load",
        "/debug/index",
        "/debug/explain",
        "/debug",
        "/version",
        "/nowhere",
        "/",
    ] {
        for header in [
            String::new(),
            with("second"),
            with("firs"),
            "authorization: Basic first\r\n".to_owned(),
        ] {
            let (status, text) = site.page(page, &header).await;
            assert_eq!(status, 401, "{page} {header}");
            assert!(
                text.to_ascii_lowercase()
                    .contains("\r\nwww-authenticate: bearer\r\n"),
                "{text}"
            );
            assert!(!text.contains("first"), "{text}");
        }
    }
    for page in ["/healthz", "/readyz"] {
        until("open", async || site.page(page, "").await.0 == 200).await;
    }
    assert_eq!(site.page("/metrics", &with("first")).await.0, 200);
    let (status, overview) = site.page("/", &with("first")).await;
    assert_eq!(status, 200);
    assert!(overview.contains("10.0.0.1:8000"), "{overview}");
    assert_eq!(site.page("/nowhere", &with("first")).await.0, 404);
    site.replace_file("token", "second");
    until("the new token", async || {
        site.page("/debug/fleet", &with("second")).await.0 == 200
    })
    .await;
    assert_eq!(site.page("/debug/fleet", &with("first")).await.0, 401);
    site.stop().await;
}

#[tokio::test]
async fn explain_sends_the_token() {
    let more = json!({"listeners": {"admin": {"address": "127.0.0.1:0", "token_file": "token"}}});
    let site = TlsSite::start(more, |directory| {
        std::fs::write(directory.join("token"), "first\n").unwrap()
    })
    .await;
    until("ready", async || site.page("/readyz", "").await.0 == 200).await;
    std::fs::write(
        site.path("body"),
        json!({"model": "m", "prompt": "why?"}).to_string(),
    )
    .unwrap();
    let explain = |token: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command
            .args([
                "explain",
                "--admin",
                &format!("http://{}", site.admin),
                "--body",
            ])
            .arg(site.path("body"));
        command.args(token).current_dir(site.path("")).output()
    };
    let refused = explain(&[]).await.unwrap();
    assert!(!refused.status.success());
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("requires a bearer token"),
        "{refused:?}"
    );
    let answered = explain(&["--token-file", "token"]).await.unwrap();
    assert!(answered.status.success(), "{answered:?}");
    site.stop().await;
}

#[tokio::test]
async fn silent_clients_are_closed_and_delay_no_other() {
    let more = json!({
        "listeners": {
            "ext_proc": {"address": "127.0.0.1:0", "tls": {"self_signed": true}},
            "limits": {"handshake_timeout": "2s"},
        },
    });
    let site = TlsSite::start(more, |_| ()).await;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(site.ext_proc).await.unwrap());
    }
    // One of the clients sends a partial TLS record.
    silent[0].write_all(&[22, 3, 1]).await.unwrap();
    let idle = dial(site.ext_proc, client(None, None, "h2")).await.unwrap();
    let caller = TlsCaller::new(site.ext_proc, client(None, None, "h2")).await;
    until("served", async || caller.is_served().await.unwrap()).await;
    for mut socket in silent {
        assert_eq!(
            timeout(PATIENCE, socket.read(&mut [0; 1]))
                .await
                .unwrap()
                .unwrap_or(0),
            0,
            "closed"
        );
    }
    site.wait_metric(
        "tls_handshakes_total{listener=\"ext_proc\",outcome=\"expired\"}",
        50.0,
    )
    .await;
    // A client that sends nothing after its handshake is closed too. A used connection stays open.
    site.wait_metric("connections{listener=\"ext_proc\"}", 1.0)
        .await;
    drop(idle);
    assert!(caller.is_served().await.unwrap());
    site.stop().await;
}

#[tokio::test]
async fn call_headers_are_bounded() {
    let more = json!({
        "listeners": {
            "limits": {"max_header_list_size": "4KiB"},
            "ext_proc": {"address": "127.0.0.1:0"},
        },
    });
    let site = TlsSite::start(more, |_| ()).await;
    let channel = site.endpoint().connect_lazy();
    until("served", async || served(channel.clone()).await.unwrap()).await;
    let call = |bytes: usize| {
        let mut request = tonic::Request::new(tonic_health::pb::HealthCheckRequest::default());
        request
            .metadata_mut()
            .insert("x-long", "x".repeat(bytes).parse().unwrap());
        let mut client = tonic_health::pb::health_client::HealthClient::new(channel.clone());
        async move { client.check(request).await }
    };
    assert!(call(3000).await.is_ok());
    assert!(call(5000).await.is_err());
    site.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_read_admin_pages_over_tls() {
    let authority = TestAuthority::new("ours");
    let other = TestAuthority::new("others");
    let more = json!({
        "listeners": {"admin": {"address": "127.0.0.1:0", "tls": {"cert_dir": "certs"}}},
    });
    let site = TlsSite::start(more, |directory| {
        authority.sign(1).write(&directory.join("certs"));
        std::fs::write(directory.join("ca.pem"), &authority.cert).unwrap();
        std::fs::write(directory.join("other.pem"), &other.cert).unwrap();
        std::fs::write(
            directory.join("body"),
            json!({"model": "m", "prompt": "why?"}).to_string(),
        )
        .unwrap();
    })
    .await;
    let admin = format!("https://{}", site.admin);
    let body = site.path("body");
    let run = async |args: &[&str], authority: &str| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command
            .args(args)
            .args(["--admin", &admin])
            .arg("--ca-file")
            .arg(site.path(authority));
        command.output().await.unwrap()
    };
    let explain = ["explain", "--body", body.to_str().unwrap()];
    until("explained", async || {
        run(&explain, "ca.pem").await.status.success()
    })
    .await;
    let audited = run(&["audit"], "ca.pem").await;
    assert!(
        audited.status.success(),
        "{}",
        String::from_utf8_lossy(&audited.stderr)
    );
    for args in [&explain[..], &["audit"]] {
        let refused = run(args, "other.pem").await;
        let stderr_text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{stderr_text}");
        assert!(stderr_text.contains("--ca-file"), "{stderr_text}");
    }
    site.stop().await;
}
