//! The pure decision: which candidate costs least.
