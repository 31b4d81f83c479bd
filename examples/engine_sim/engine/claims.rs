//! Requests under way whose prompts other engines computed, by the number those gave them and by nothing else, as a
//! generation engine of TensorRT-LLM's kind has it. Numbers that two context engines gave out at the same time are one
//! number here.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;

/// By number: the engine that it is taken for, and how many go by it.
type Table = HashMap<String, (String, usize)>;

#[derive(Debug, Default)]
pub(crate) struct Claims(Arc<Mutex<Table>>);

/// One who goes by a number, while it lasts.
#[derive(Debug)]
pub(crate) struct Claim {
    table: Arc<Mutex<Table>>,
    number: String,
    /// Whether somebody else's blocks go by this number already.
    pub(crate) is_taken: bool,
}

impl Claims {
    pub(crate) fn enter(&self, number: &str, engine: &str) -> Claim {
        let mut table = self.0.lock();
        let (first, users) = table
            .entry(number.to_owned())
            .or_insert_with(|| (engine.to_owned(), 0));
        *users += 1;
        Claim {
            table: self.0.clone(),
            number: number.to_owned(),
            is_taken: first != engine,
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = self.table.lock().entry(self.number.clone()) {
            entry.get_mut().1 -= 1;
            if entry.get().1 == 0 {
                entry.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_belongs_to_the_first_engine_until_all_who_go_by_it_have_left() {
        let claims = Claims::default();
        let first = claims.enter("17", "a");
        let (same, other) = (claims.enter("17", "a"), claims.enter("17", "b"));
        assert_eq!(
            [&first, &same, &other].map(|claim| claim.is_taken),
            [false, false, true]
        );
        assert!(!claims.enter("18", "b").is_taken);
        drop((first, same));
        assert!(claims.enter("17", "b").is_taken, "one is left");
        drop(other);
        assert!(!claims.enter("17", "b").is_taken);
        assert!(claims.0.lock().is_empty());
    }
}
