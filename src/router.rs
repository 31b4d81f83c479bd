//! The answer to one request.
