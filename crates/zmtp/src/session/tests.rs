use super::*;

/// Returns the peer's side of the handshake.
fn handshake(minor: u8, socket_type: &str) -> BytesMut {
    let mut bytes = BytesMut::from(&greeting()[..]);
    bytes[11] = minor;
    put_command(&mut bytes, &command::ready_body(socket_type));
    bytes
}

fn sub() -> SocketRole {
    SocketRole::Sub {
        topic: Bytes::from_static(b"kv"),
    }
}

fn ready(role: SocketRole, minor: u8, limits: MessageLimits) -> ZmtpSession {
    let peer = if role == SocketRole::Dealer {
        "ROUTER"
    } else {
        "PUB"
    };
    let mut session = ZmtpSession::new(role, limits);
    assert_eq!(
        session.process(&mut handshake(minor, peer)),
        Ok(Some(SessionEvent::Ready))
    );
    session
}

fn events(
    session: &mut ZmtpSession,
    mut input: BytesMut,
) -> Result<Vec<SessionEvent>, ProtocolError> {
    let mut events = Vec::new();
    while let Some(event) = session.process(&mut input)? {
        events.push(event);
    }
    Ok(events)
}

fn message(frames: &[&[u8]]) -> BytesMut {
    let mut wire = BytesMut::new();
    for (at, frame) in frames.iter().enumerate() {
        put_part(&mut wire, frame, at + 1 < frames.len());
    }
    wire
}

fn received(frames: &[&[u8]]) -> SessionEvent {
    SessionEvent::Message(
        frames
            .iter()
            .map(|frame| Bytes::copy_from_slice(frame))
            .collect(),
    )
}

#[test]
fn subscription_has_the_form_of_the_peers_version() {
    for (minor, subscription) in [
        (0, &b"\x00\x03\x01kv"[..]),
        (1, b"\x04\x0c\x09SUBSCRIBEkv"),
        (7, b"\x04\x0c\x09SUBSCRIBEkv"),
    ] {
        let mut session = ready(sub(), minor, MessageLimits::default());
        let expected = [
            &greeting()[..],
            b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB",
            subscription,
        ]
        .concat();
        assert_eq!(session.output()[..], expected, "minor version {minor}");
    }
}

#[test]
fn dealer_sends_frames_with_continuation() {
    let mut session = ready(SocketRole::Dealer, 1, MessageLimits::default());
    session.output().clear();
    session.send(&[Bytes::new(), Bytes::from_static(b"12345678")]);
    assert_eq!(session.output()[..], *b"\x01\x00\x00\x0812345678");
}

#[test]
fn handshake_refuses_other_sockets_and_errors() {
    let mut error = BytesMut::from(&greeting()[..]);
    put_command(&mut error, b"\x05ERROR\x04full");
    let mut early = BytesMut::from(&greeting()[..]);
    put_command(&mut early, command::PING);
    let cases = [
        (
            handshake(1, "PUSH"),
            ProtocolError::SocketType {
                peer: "PUSH".to_owned(),
                ours: "SUB",
            },
        ),
        (
            handshake(1, ""),
            ProtocolError::SocketType {
                peer: String::new(),
                ours: "SUB",
            },
        ),
        (error, ProtocolError::Rejected("full".to_owned())),
        (early, ProtocolError::NotReady),
    ];
    for (mut input, expected) in cases {
        assert_eq!(
            ZmtpSession::new(sub(), MessageLimits::default()).process(&mut input),
            Err(expected)
        );
    }
}

#[test]
fn ping_between_frames_of_message_is_answered() {
    let mut session = ready(sub(), 0, MessageLimits::default());
    assert!(!session.ping(), "a ZMTP 3.0 peer may not support PING");
    session.output().clear();
    let mut wire = message(&[b"kv", b"1"]);
    let rest = wire.split_off(4);
    put_command(&mut wire, b"\x04PING\x00\x05ctx");
    wire.extend_from_slice(&rest);
    assert_eq!(
        events(&mut session, wire),
        Ok(vec![received(&[b"kv", b"1"])])
    );
    assert_eq!(session.output()[..], *b"\x04\x08\x04PONGctx");
    assert!(session.ping(), "a peer that sends PING supports it");
}

#[test]
fn message_after_oversize_messages_is_received() {
    let limits = MessageLimits {
        max_bytes: 10,
        max_frames: 3,
    };
    let mut session = ready(sub(), 1, limits);
    let wire = [
        message(&[b"12345", b"12345"]),
        message(&[b"12345", b"123456"]),
        message(&[b"12345678901", b"x"]),
        message(&[b"12345678901", &[7; 100], b""]),
        message(&[b"", b"", b""]),
        message(&[b"", b"", b"", b""]),
        message(&[b"after"]),
    ];
    let expected = vec![
        received(&[b"12345", b"12345"]),
        SessionEvent::Oversize(ExceededLimit::Message),
        SessionEvent::Oversize(ExceededLimit::Message),
        SessionEvent::Oversize(ExceededLimit::Message),
        received(&[b"", b"", b""]),
        SessionEvent::Oversize(ExceededLimit::Frames),
        received(&[b"after"]),
    ];
    assert_eq!(
        events(&mut session, BytesMut::from(&wire.concat()[..])),
        Ok(expected)
    );
}

#[test]
fn message_far_beyond_the_limit_ends_the_connection() {
    let limits = MessageLimits {
        max_bytes: 10,
        max_frames: 3,
    };
    let mut session = ready(sub(), 1, limits);
    let mut long = BytesMut::from(&[2][..]);
    long.extend_from_slice(&161_u64.to_be_bytes());
    assert_eq!(
        events(&mut session, long),
        Err(ProtocolError::MessageTooLarge(161))
    );
    let mut session = ready(sub(), 1, limits);
    let endless = message(&[&b"123456789"[..]; 18]);
    assert_eq!(
        events(&mut session, endless),
        Err(ProtocolError::MessageTooLarge(9))
    );
    let mut session = ready(sub(), 1, limits);
    let endless = message(&[&b""[..]; 100]);
    assert_eq!(
        events(&mut session, endless),
        Err(ProtocolError::TooManyFrames)
    );
}
