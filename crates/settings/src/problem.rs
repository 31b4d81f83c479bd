//! Positions in a settings file, and problems with its values.

/// Position in a settings file. A number is 0 if it is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourcePosition {
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
}

/// One step of the path from the root of a file to a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathStep {
    /// The value of a key in a map.
    Key(String),
    /// The element of a list at an index, from 0.
    At(usize),
}

impl From<&str> for PathStep {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for PathStep {
    fn from(at: usize) -> Self {
        Self::At(at)
    }
}

/// Semantic problem with a value, found after deserialization. It names the value by its path, and
/// [`SettingsDocument::locate`](crate::SettingsDocument::locate) adds the line. Deserialized settings
/// are therefore plain values without positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path from the root to the value. If the file lacks the value, the error has the position of
    /// the last value on the path that exists.
    pub path: Vec<PathStep>,
    /// Problem and fix.
    pub text: String,
}

impl Problem {
    /// Creates a problem with the value of a key.
    pub fn of(key: &str, text: impl Into<String>) -> Self {
        Self {
            path: vec![key.into()],
            text: text.into(),
        }
    }

    /// Creates a problem with the value at the end of a path.
    pub fn at(path: impl IntoIterator<Item = PathStep>, text: impl Into<String>) -> Self {
        Self {
            path: path.into_iter().collect(),
            text: text.into(),
        }
    }

    /// Prepends a step to the path.
    #[must_use]
    pub fn within(mut self, outer: impl Into<PathStep>) -> Self {
        self.path.insert(0, outer.into());
        self
    }
}

/// Prepends a step to the path of each problem.
pub fn all_within(
    outer: impl Into<PathStep>,
    problems: impl IntoIterator<Item = Problem>,
) -> impl Iterator<Item = Problem> {
    let outer = outer.into();
    problems
        .into_iter()
        .map(move |problem| problem.within(outer.clone()))
}

/// Returns the problem of a value that must be the name of an HTTP header, and not of a
/// pseudo-header. `example` is a valid name.
pub fn header_name_problem(at: impl Into<PathStep>, name: &str, example: &str) -> Option<Problem> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if !name.is_empty() && name.bytes().all(is_allowed) {
        return None;
    }
    let text = format!("`{name}` is not the name of a header; write for example {example}");
    Some(Problem::at([at.into()], text))
}

/// Returns the problems of a list of header names.
pub fn header_name_problems(
    key: &str,
    names: &[String],
    example: &str,
) -> impl Iterator<Item = Problem> {
    let names = names.iter().enumerate();
    all_within(
        key,
        names.filter_map(move |(at, name)| header_name_problem(at, name, example)),
    )
}
