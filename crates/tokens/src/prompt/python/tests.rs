use std::path::Path;

use serde::Deserialize;

use super::*;

/// Output of Python, recorded by `tests/data/tokens/make_python_repr.py`.
#[derive(Deserialize)]
struct PythonOutput {
    printable: PrintableRanges,
    characters: Vec<(u32, String)>,
    texts: Vec<(String, String)>,
}

/// Ranges of code points that are printable in Python 3.11, and ranges that later versions print
/// differently from it.
#[derive(Deserialize)]
struct PrintableRanges {
    #[serde(rename = "3.11")]
    in_3_11: Vec<(u32, u32)>,
    #[serde(rename = "3.12")]
    changed_in_3_12: Vec<(u32, u32)>,
    #[serde(rename = "3.13")]
    changed_in_3_13: Vec<(u32, u32)>,
}

fn python_output() -> PythonOutput {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let file = std::fs::read(root.join("tests/data/tokens/python_repr.json")).unwrap();
    serde_json::from_slice(&file).unwrap()
}

fn quoted(text: &str) -> String {
    repr(&Value::from(text))
}

#[test]
fn quoted_characters_equal_python_output() {
    let PythonOutput {
        printable,
        characters,
        texts,
    } = python_output();
    let mut tables = [
        vec![false; 0x11_0000],
        vec![false; 0x11_0000],
        vec![false; 0x11_0000],
    ];
    let changes = [vec![], printable.changed_in_3_12, printable.changed_in_3_13];
    for (table, changed) in tables.iter_mut().zip(changes) {
        for (first, last) in printable.in_3_11.iter().copied().chain(changed) {
            (first..=last).for_each(|code| table[code as usize] = true);
        }
    }
    let mut undecided = 0;
    for code in 0..0x11_0000 {
        let Some(c) = char::from_u32(code) else {
            continue;
        };
        let known = tables.each_ref().map(|table| table[code as usize]);
        match is_printable(c) {
            Some(ours) => assert_eq!(known, [ours; 3], "{code:x}"),
            None => undecided += 1,
        }
        let is_certain = known.iter().all(|printable| *printable == known[0]);
        assert!(is_certain || is_printable(c).is_none(), "{code:x}");
    }
    // Unicode 15 to 18 added these characters.
    assert!((4_000..40_000).contains(&undecided), "{undecided}");
    for (code, expected) in characters {
        let c = char::from_u32(code).unwrap();
        assert_eq!(quoted(&c.to_string()), expected, "{code:x}");
    }
    for (text, expected) in texts {
        assert_eq!(quoted(&text), expected);
    }
}

#[test]
fn new_characters_are_not_printed() {
    for c in ['\u{cf3}', '\u{1fadf}', '\u{323af}'] {
        assert!(quoted(&c.to_string()).contains(POISON), "{c:?}");
    }
}
