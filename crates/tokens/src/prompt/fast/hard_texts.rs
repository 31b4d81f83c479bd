//! Difficult texts, on which a fast tokenizer must agree with the library before it is used.

/// Pieces of the difficult texts.
pub(crate) const PIECES: &[&str] = &[
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\u{a0}",
    "\u{2003}",
    "\u{3000}",
    "\u{85}",
    "\u{200b}",
    "\u{feff}",
    "\0",
    "a",
    "b",
    "A",
    "Z",
    "the",
    " the",
    "The",
    "HTTPServer",
    "camelCase",
    "ALLCAPS",
    "x1",
    "1",
    "12",
    "123",
    "1234",
    "3.14",
    "١٢٣",
    "Ⅷ",
    "½",
    "'s",
    "'S",
    "'ll",
    "'LL",
    "'re",
    "'K",
    "'",
    "’s",
    "don't",
    "é",
    "e\u{301}",
    "\u{301}",
    "\u{301}\u{323}",
    "\u{323}\u{301}",
    "\u{212b}",
    "\u{fb01}",
    "ß",
    "aſ",
    "'aſ",
    "İ",
    "ŉ",
    "ǅ",
    "ʰ",
    "ª",
    "中",
    "中文字",
    "日本語",
    "ひらがな",
    "カタカナ",
    "한국어",
    "\u{1100}\u{1161}",
    "ไทย",
    "हिन्दी",
    "क्ष",
    "العربية",
    "עברית",
    "Ελληνικά",
    "Привет",
    " привет",
    "ᏣᎳᎩ",
    "𝒳",
    "𐍈",
    "😀",
    "👨‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🇩🇪",
    "👍🏽",
    "\u{fffd}",
    "\u{10ffff}",
    "\u{e000}",
    "!",
    "!!!",
    "...",
    "://",
    "/",
    "//\n",
    "_",
    "__init__",
    "{",
    "}",
    "()",
    "->",
    "=>",
    "==",
    "\"",
    "`",
    "```\n",
    "$",
    "€",
    "≠",
    "±",
    "<",
    ">",
    "<|",
    "|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<|im_",
    "<a>",
    "<ab>",
    "<a>b",
    "<n>",
    " \n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                        ",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "qzxjkvbqzxjkvbqzxjkvbqzxjkvbqzxjkvbqzxjkvb",
    "SGVsbG8gV29ybGQhIFRoaXMgaXMgYmFzZTY0Lg==",
    "\n\n\n\n",
    "\t\t\tif",
    "--------------------------------------------------",
    "fn main() {\n    println!(\"{}\", 0x7f_u8 as f64 / 3.0e-8); // why?\n}\n",
    "def f(x):\n\treturn x**2 if x != None else []\n",
    "<div class=\"a-b\">&nbsp;&amp;</div>\r\n",
    "{\"role\": \"user\", \"content\": [1, -2.5, null, true]}",
    "SELECT * FROM t WHERE a<>'b';",
    "https://example.org/a/b?c=d&e=%20#f",
    "2026-11-21T21:48:00+00:00",
    "C:\\Users\\x",
    "\\frac{a}{b} \\le \\sum_{i=0}^n x_i^2",
];

/// Plain prose.
const PROSE: &str = "The worker whose cache is warm answers first. \"Isn't that obvious?\", she \
    asked; it's what they'd said, we'll see. Zwölf Boxkämpfer jagen Viktor quer über den großen \
    Sylter Deich. Portez ce vieux whisky au juge blond qui fume. El pingüino Wenceslao hizo \
    kilómetros. Съешь же ещё этих мягких французских булок. いろはにほへと ちりぬるを。天地玄黄，宇宙洪荒。";

/// Length of the longest text in bytes. The fast library changes its algorithm at 64 KiB and at
/// 256 KiB.
const DOCUMENT_BYTES: usize = 300 << 10;

/// Returns about 30 KB of texts with `added` tokens between the pieces, and one long document.
/// They contain no very long words.
pub(super) fn hard_texts(added: &[&str]) -> Vec<String> {
    let mut texts = vec![
        PROSE.to_owned(),
        PIECES.concat(),
        PIECES.join(" "),
        PIECES.join("\n"),
        PIECES.join("a"),
    ];
    texts.push(PIECES.iter().rev().copied().collect());
    for step in [7, 11, 31] {
        texts.push(
            (0..PIECES.len())
                .map(|at| PIECES[at * step % PIECES.len()])
                .collect(),
        );
    }
    texts.extend(["a", " ", "ab", "\n", "é"].map(|piece| piece.repeat(200 / piece.len())));
    // A few hundred added tokens are enough. Some tokenizers have thousands of reserved ones.
    let between = PIECES.iter().cycle().zip(added.iter().take(300));
    texts.push(
        between
            .map(|(piece, token)| format!("{piece}{token}"))
            .collect(),
    );
    texts.push(
        added
            .iter()
            .take(300)
            .map(|token| format!("x {token} {token}y"))
            .collect(),
    );
    texts.push(
        format!(
            "{} {}{}",
            PIECES.join(" "),
            added.first().unwrap_or(&""),
            PROSE
        )
        .repeat(DOCUMENT_BYTES / 1500),
    );
    texts
}
