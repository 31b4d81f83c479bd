//! KV events of the engines.
