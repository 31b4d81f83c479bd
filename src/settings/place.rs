//! Where in a settings file something stands, and what is wrong there.

/// Line and column, both from 1; 0 is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

/// One step from a value to a value inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// To the value of a key.
    Key(String),
    /// To an element of a list, from 0.
    At(usize),
}

impl From<&str> for Step {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for Step {
    fn from(at: usize) -> Self {
        Self::At(at)
    }
}

/// A mistake of meaning: the value it is about, named by its trail from the root, and the sentence. The line is looked up
/// only for values that are wrong, so the settings themselves stay plain values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The way from the root to the value at fault. Steps that the text does not have are left out when looking it up.
    pub trail: Vec<Step>,
    /// What is wrong and how to mend it.
    pub text: String,
}

impl Problem {
    /// A problem of the value of one key.
    pub fn of(key: &str, text: impl Into<String>) -> Self {
        Self {
            trail: vec![key.into()],
            text: text.into(),
        }
    }

    /// A problem of the value at the end of a trail.
    pub fn at(trail: impl IntoIterator<Item = Step>, text: impl Into<String>) -> Self {
        Self {
            trail: trail.into_iter().collect(),
            text: text.into(),
        }
    }

    /// The same problem seen from further out.
    #[must_use]
    pub fn within(mut self, outer: impl Into<Step>) -> Self {
        self.trail.insert(0, outer.into());
        self
    }
}
