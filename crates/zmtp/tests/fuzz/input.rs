//! Inputs that usually pass the greeting: a valid conversation with a few changed bytes.

use rand::RngExt as _;
use rand::rngs::SmallRng;

/// Generates one input.
pub(crate) fn input(random: &mut SmallRng) -> Vec<u8> {
    let dealer = random.random::<bool>();
    let mut input = vec![u8::from(dealer), random.random()];
    let minor = random.random_range(0..3_u8);
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[11] = minor;
    greeting[12..16].copy_from_slice(b"NULL");
    input.extend(greeting);
    let socket_type: &[u8] = match (dealer, random.random::<bool>()) {
        (true, _) => b"ROUTER",
        (false, true) => b"PUB",
        (false, false) => b"XPUB",
    };
    let mut ready = b"\x05READY\x0bSocket-Type\x00\x00\x00".to_vec();
    ready.push(socket_type.len() as u8);
    ready.extend(socket_type);
    if random.random::<bool>() {
        ready.extend(b"\x08Identity\x00\x00\x00\x00");
    }
    append_frame(&mut input, 4, &ready, random);
    for _ in 0..random.random_range(0..12) {
        append_traffic(&mut input, random);
    }
    if random.random_bool(0.6) {
        for _ in 0..random.random_range(1..4) {
            mutate(&mut input, random);
        }
    }
    input
}

fn append_traffic(input: &mut Vec<u8>, random: &mut SmallRng) {
    match random.random_range(0..10) {
        0 => append_frame(input, 4, b"\x04PING\x00\x00context", random),
        1 => append_frame(input, 4, b"\x04PONG", random),
        2 => append_frame(input, 4, b"\x09SUBSCRIBEkv", random),
        kind => {
            let length = match kind {
                3 => random.random_range(0..2000),
                4 | 5 => random.random_range(80..110),
                _ => random.random_range(0..40),
            };
            let body: Vec<u8> = (0..length).map(|at| at as u8).collect();
            append_frame(input, random.random_range(0..2), &body, random);
        }
    }
}

fn append_frame(input: &mut Vec<u8>, flags: u8, body: &[u8], random: &mut SmallRng) {
    if body.len() > 255 || random.random_bool(0.1) {
        input.push(flags | 2);
        input.extend((body.len() as u64).to_be_bytes());
    } else {
        input.extend([flags, body.len() as u8]);
    }
    input.extend(body);
}

fn mutate(input: &mut Vec<u8>, random: &mut SmallRng) {
    if input.is_empty() {
        return;
    }
    let at = random.random_range(0..input.len());
    match random.random_range(0..5) {
        0 => input[at] = random.random(),
        1 => input[at] ^= 1 << random.random_range(0..8),
        2 => input.truncate(at),
        3 => input.insert(at, random.random()),
        _ => {
            let length: u64 = if random.random() {
                random.random()
            } else {
                random.random_range(0..4096)
            };
            let header = [&[random.random_range(0..8) | 2], &length.to_be_bytes()[..]].concat();
            input.splice(at..at, header);
        }
    }
}
