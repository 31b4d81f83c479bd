//! How busy each worker rank is with the requests we routed.
