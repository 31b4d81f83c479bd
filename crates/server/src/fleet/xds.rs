//! Publication of worker endpoints to Envoy: by an EDS file on the same machine, or by an xDS
//! server for any number of Envoys. Both publish the same data.

mod assignments;
mod clients;
pub mod config;
pub mod eds_file;
mod service;
mod subscription;
mod subset_labels;
mod variant;

pub use clients::{XdsClientStatus, XdsClients};
pub use service::XdsService;
