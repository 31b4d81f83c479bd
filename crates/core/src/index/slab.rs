//! Slab whose ids and addresses are stable. It grows by pages, so nothing is moved while readers
//! wait.

use std::ops::{Index, IndexMut};

/// Elements per page.
const PAGE_LEN: usize = 256;

#[derive(Debug)]
pub(super) struct PagedSlab<T> {
    pages: Vec<Vec<T>>,
    free: Vec<u32>,
    len: u32,
}

impl<T> Default for PagedSlab<T> {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            free: Vec::new(),
            len: 0,
        }
    }
}

impl<T: Default> PagedSlab<T> {
    /// Returns the number of elements.
    pub(super) fn len(&self) -> usize {
        self.len as usize - self.free.len()
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        if let Some(id) = self.free.pop() {
            self[id] = value;
            return id;
        }
        match self.pages.last_mut().filter(|page| page.len() < PAGE_LEN) {
            Some(page) => page.push(value),
            None => {
                // Only the first page grows by copying.
                let mut page = Vec::with_capacity(if self.pages.is_empty() { 4 } else { PAGE_LEN });
                page.push(value);
                self.pages.push(page);
            }
        }
        self.len += 1;
        self.len - 1
    }

    pub(super) fn remove(&mut self, id: u32) -> T {
        self.free.push(id);
        std::mem::take(&mut self[id])
    }
}

impl<T> Index<u32> for PagedSlab<T> {
    type Output = T;

    fn index(&self, id: u32) -> &T {
        &self.pages[id as usize / PAGE_LEN][id as usize % PAGE_LEN]
    }
}

impl<T> IndexMut<u32> for PagedSlab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.pages[id as usize / PAGE_LEN][id as usize % PAGE_LEN]
    }
}
