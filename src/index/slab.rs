//! Things with numbers that stay, in pieces of memory that stay, too: growing moves nothing while readers wait.

use std::ops::{Index, IndexMut};

/// Things in one piece.
const PIECE: usize = 256;

#[derive(Debug)]
pub(super) struct Slab<T> {
    pieces: Vec<Vec<T>>,
    free: Vec<u32>,
    len: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            pieces: Vec::new(),
            free: Vec::new(),
            len: 0,
        }
    }
}

impl<T: Default> Slab<T> {
    /// Things in it.
    pub(super) fn len(&self) -> usize {
        self.len as usize - self.free.len()
    }

    pub(super) fn add(&mut self, thing: T) -> u32 {
        if let Some(id) = self.free.pop() {
            self[id] = thing;
            return id;
        }
        match self.pieces.last_mut().filter(|piece| piece.len() < PIECE) {
            Some(piece) => piece.push(thing),
            None => {
                // Only a slab that is small grows by copying.
                let mut piece = Vec::with_capacity(if self.pieces.is_empty() { 4 } else { PIECE });
                piece.push(thing);
                self.pieces.push(piece);
            }
        }
        self.len += 1;
        self.len - 1
    }

    pub(super) fn take(&mut self, id: u32) -> T {
        self.free.push(id);
        std::mem::take(&mut self[id])
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, id: u32) -> &T {
        &self.pieces[id as usize / PIECE][id as usize % PIECE]
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.pieces[id as usize / PIECE][id as usize % PIECE]
    }
}
