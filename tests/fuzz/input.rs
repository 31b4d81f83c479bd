//! Structure out of the bytes that a fuzzer makes up. At their end everything is zero, so that every input is a whole one.

/// What is left of an input.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// An input from its beginning.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    /// True for every second byte.
    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// True for one byte of sixteen, so that what is rare stays rare in noise.
    pub(crate) fn rarely(&mut self) -> bool {
        self.byte() & 15 == 15
    }

    /// One of several.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Some bytes, their number before them in two bytes.
    pub(crate) fn chunk(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        let (chunk, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        chunk
    }

    /// Some bytes as text.
    pub(crate) fn text(&mut self) -> String {
        String::from_utf8_lossy(self.chunk()).into_owned()
    }

    /// All that is left.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }
}

/// Cuts bytes into pieces, differently for every seed.
pub(crate) fn pieces(bytes: &[u8], seed: u8) -> impl Iterator<Item = &[u8]> {
    let (mut rest, mut state) = (bytes, u32::from(seed) | 1);
    std::iter::from_fn(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let longest = [1, 3, 17, 4096][usize::from(seed >> 1) % 4];
        let length = ((state >> 16) as usize % (longest + 1)).min(rest.len());
        let piece;
        (piece, rest) = rest.split_at(length);
        // A piece may be empty, but not for ever.
        (!rest.is_empty() || !piece.is_empty()).then_some(piece)
    })
}
