//! Positions in a settings file, and problems of its values.

/// Line and column, both from 1; 0 if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

/// Step from a value to a value inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Value of a key.
    Key(String),
    /// Element of a list, from 0.
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

/// Semantic problem of a value. The value is named by its path from the root. The line is looked up
/// only for a problem, so settings are plain values without positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path from the root to the value. The lookup of the line ends at the first step that the file
    /// lacks.
    pub trail: Vec<Step>,
    /// Problem and fix.
    pub text: String,
}

impl Problem {
    /// Creates a problem of the value of a key.
    pub fn of(key: &str, text: impl Into<String>) -> Self {
        Self {
            trail: vec![key.into()],
            text: text.into(),
        }
    }

    /// Creates a problem of the value at the end of a path.
    pub fn at(trail: impl IntoIterator<Item = Step>, text: impl Into<String>) -> Self {
        Self {
            trail: trail.into_iter().collect(),
            text: text.into(),
        }
    }

    /// Prepends a step to the path.
    #[must_use]
    pub fn within(mut self, outer: impl Into<Step>) -> Self {
        self.trail.insert(0, outer.into());
        self
    }
}
