//! The rows of the table, one module per subject.

pub mod approximate;
pub mod booking;
pub mod crowd;
pub mod hash;
pub mod index;
pub mod selection;

/// Name of the measure, its unit, and the largest acceptable ratio.
pub type StaticMeasure = warmroute_testbed::comparison::ComparedMeasure<'static>;
