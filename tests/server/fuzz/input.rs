//! Structured values from fuzzer bytes. After the end of the input all bytes are zero, so every
//! input is complete.

/// Remaining bytes of an input.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Creates an input from its bytes.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns the next byte.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    /// Returns a random flag.
    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Returns true for one of sixteen byte values, so that rare events stay rare in random input.
    pub(crate) fn rarely(&mut self) -> bool {
        self.byte() & 15 == 15
    }

    /// Returns one of several values.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Returns a byte string with a two-byte length prefix.
    pub(crate) fn chunk(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        let (chunk, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        chunk
    }

    /// Returns a byte string as text.
    pub(crate) fn text(&mut self) -> String {
        String::from_utf8_lossy(self.chunk()).into_owned()
    }

    /// Returns all remaining bytes.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }
}

/// Splits bytes into chunks. The seed selects their lengths.
pub(crate) fn pieces(bytes: &[u8], seed: u8) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    let mut state = u32::from(seed) | 1;
    std::iter::from_fn(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let longest = [1, 3, 17, 4096][usize::from(seed >> 1) % 4];
        let length = ((state >> 16) as usize % (longest + 1)).min(rest.len());
        let piece;
        (piece, rest) = rest.split_at(length);
        // A chunk may be empty, but not the last one.
        (!rest.is_empty() || !piece.is_empty()).then_some(piece)
    })
}
