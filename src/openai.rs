//! OpenAI request bodies.
