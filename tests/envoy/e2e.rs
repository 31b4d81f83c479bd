//! The main path: a real Envoy with the shipped configuration, the real warmroute, and simulated
//! engines that tokenize, cache and publish events. Each test starts its own deployment on free
//! ports.

mod admin;
mod fleet;
mod routing;
mod strict;
mod unroutable;
