//! Huffman code of HPACK (RFC 7541, appendix B). The code is canonical, so the code lengths define
//! it: shorter codes come first, and codes of equal length are in symbol order.

/// Code length in bits of each octet, and of the end-of-string symbol.
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5,
    5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6,
    6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22,
    23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22,
    21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20,
    22, 22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19,
    21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22,
    22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];

const END_OF_STRING: u16 = 256;
const SHORTEST: usize = 5;
const LONGEST: usize = 30;

/// Tables of the canonical code.
struct HuffmanCode {
    /// Code of each symbol, right-aligned.
    codes: [u32; 257],
    /// Symbols in code order.
    symbols: [u16; 257],
    /// For each length, the end of the codes up to that length, left-aligned in 32 bits.
    ends: [u64; LONGEST + 1],
    /// For each length, the first code of that length and its index in `symbols`.
    firsts: [(u32, u16); LONGEST + 1],
}

static CODE: HuffmanCode = build();

const fn build() -> HuffmanCode {
    let mut code = HuffmanCode {
        codes: [0; 257],
        symbols: [0; 257],
        ends: [0; LONGEST + 1],
        firsts: [(0, 0); LONGEST + 1],
    };
    let mut next: u32 = 0;
    let mut place = 0;
    let mut length = SHORTEST;
    while length <= LONGEST {
        code.firsts[length] = (next, place as u16);
        let mut symbol = 0;
        while symbol < LENGTHS.len() {
            if LENGTHS[symbol] as usize == length {
                code.codes[symbol] = next;
                code.symbols[place] = symbol as u16;
                next += 1;
                place += 1;
            }
            symbol += 1;
        }
        code.ends[length] = (next as u64) << (32 - length);
        next <<= 1;
        length += 1;
    }
    code
}

/// Encodes a string.
pub(crate) fn encode(octets: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(octets.len());
    let mut pending: u64 = 0;
    let mut bits = 0;
    for &octet in octets {
        let length = LENGTHS[octet as usize];
        pending = pending << length | u64::from(CODE.codes[octet as usize]);
        bits += length;
        while bits >= 8 {
            bits -= 8;
            encoded.push((pending >> bits) as u8);
        }
    }
    if bits > 0 {
        // The padding is the start of the end-of-string code, which is all ones.
        encoded.push((pending << (8 - bits)) as u8 | 0xff >> bits);
    }
    encoded
}

/// Decodes a string. Returns `None` if it is malformed.
pub(crate) fn decode(encoded: &[u8]) -> Option<Vec<u8>> {
    let mut octets = Vec::with_capacity(encoded.len() * 8 / SHORTEST);
    decode_each(encoded, |octet| octets.push(octet))?;
    Some(octets)
}

/// Returns the decoded length, or `None` if the string is malformed.
pub(crate) fn decoded_len(encoded: &[u8]) -> Option<usize> {
    let mut octets = 0;
    decode_each(encoded, |_| octets += 1)?;
    Some(octets)
}

fn decode_each(encoded: &[u8], mut on_octet: impl FnMut(u8)) -> Option<()> {
    let mut rest = encoded.iter();
    // The next bits, left-aligned.
    let mut window: u64 = 0;
    let mut bits = 0;
    loop {
        while bits <= 56 {
            let Some(&octet) = rest.next() else { break };
            window |= u64::from(octet) << (56 - bits);
            bits += 8;
        }
        if bits < 8 && window >> (64 - 8) == u64::from(!(0xff_u8 >> bits)) {
            return Some(());
        }
        let head = window >> 32;
        let length = (SHORTEST..=LONGEST).find(|&length| head < CODE.ends[length])?;
        let (first, place) = CODE.firsts[length];
        let symbol =
            CODE.symbols[place as usize + ((head >> (32 - length)) as u32 - first) as usize];
        if symbol == END_OF_STRING || length > bits {
            return None;
        }
        on_octet(symbol as u8);
        window <<= length;
        bits -= length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        text.split(' ')
            .flat_map(|word| [&word[..2], &word[2..]])
            .filter(|octet| !octet.is_empty())
            .map(|octet| u8::from_str_radix(octet, 16).unwrap())
            .collect()
    }

    /// RFC 7541, appendix C.4 and C.6.
    #[test]
    fn rfc_examples_encode_and_decode() {
        for (text, encoded) in [
            ("www.example.com", "f1e3 c2e5 f23a 6ba0 ab90 f4ff"),
            ("no-cache", "a8eb 1064 9cbf"),
            ("custom-key", "25a8 49e9 5ba9 7d7f"),
            ("custom-value", "25a8 49e9 5bb8 e8b4 bf"),
            ("302", "6402"),
            ("private", "aec3 771a 4b"),
            (
                "Mon, 21 Oct 2013 20:13:21 GMT",
                "d07a be94 1054 d444 a820 0595 040b 8166 e082 a62d 1bff",
            ),
            (
                "https://www.example.com",
                "9d29 ad17 1863 c78f 0b97 c8e9 ae82 ae43 d3",
            ),
            (
                "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
                "94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
            ),
        ] {
            assert_eq!(encode(text.as_bytes()), hex(encoded), "{text}");
            assert_eq!(decode(&hex(encoded)).unwrap(), text.as_bytes(), "{text}");
            assert_eq!(decoded_len(&hex(encoded)), Some(text.len()), "{text}");
        }
    }

    #[test]
    fn every_octet_round_trips_in_every_position() {
        for octet in 0..=u8::MAX {
            for before in 0..8 {
                let octets = [vec![b'0'; before], vec![octet, octet]].concat();
                assert_eq!(decode(&encode(&octets)).as_deref(), Some(&*octets));
            }
        }
    }

    #[test]
    fn malformed_padding_and_end_of_string_are_refused() {
        assert_eq!(decode(&[0xff]), None, "eight bits of padding");
        assert_eq!(decode(&[0b0000_0000]), None, "padding of zeros");
        assert_eq!(
            decode(&[0xff, 0xff, 0xff, 0xff]),
            None,
            "the end of the string"
        );
        assert_eq!(decode(&[0b0000_0111]).as_deref(), Some(&b"0"[..]));
        assert_eq!(decode(&[]).as_deref(), Some(&b""[..]));
    }
}
