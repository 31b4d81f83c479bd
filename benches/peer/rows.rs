//! The rows of the table, by what they measure.

pub mod approximate;
pub mod booking;
pub mod crowd;
pub mod hash;
pub mod index;
pub mod selection;

/// What is measured, in what unit, and the largest ratio that is good enough.
pub type Goal = (&'static str, &'static str, Option<f64>);
