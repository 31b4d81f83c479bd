//! All known workers at an instant: an immutable snapshot with a dense slot per worker rank.
