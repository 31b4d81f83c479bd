//! LoRA adapters that the engine serves. As in vLLM, clients can load and unload them at run time.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::SimEngine;
use super::cache::LoraAdapter;
use super::error::OpenAiError;

/// The loaded adapters.
#[derive(Debug, Default)]
pub(crate) struct LoadedAdapters(Mutex<AdapterList>);

#[derive(Debug, Default)]
struct AdapterList {
    adapters: Vec<LoraAdapter>,
    last_id: u32,
}

#[derive(Deserialize)]
struct AdapterName {
    lora_name: String,
}

impl LoadedAdapters {
    pub(crate) fn new(names: &[String]) -> Self {
        let loaded = Self::default();
        for name in names {
            loaded.load(name);
        }
        loaded
    }

    pub(crate) fn find(&self, name: &str) -> Option<LoraAdapter> {
        let list = self.0.lock();
        let mut adapters = list.adapters.iter();
        adapters.find(|adapter| &*adapter.name == name).cloned()
    }

    /// Loads an adapter. Returns false if it was loaded before.
    fn load(&self, name: &str) -> bool {
        if self.find(name).is_some() {
            return false;
        }
        let mut list = self.0.lock();
        list.last_id += 1;
        let id = list.last_id;
        list.adapters.push(LoraAdapter {
            id,
            name: name.into(),
        });
        true
    }

    /// Unloads an adapter. Returns false if it was not loaded.
    fn unload(&self, name: &str) -> bool {
        let adapters = &mut self.0.lock().adapters;
        let before = adapters.len();
        adapters.retain(|adapter| &*adapter.name != name);
        adapters.len() < before
    }

    fn names(&self) -> Vec<String> {
        let list = self.0.lock();
        let names = list.adapters.iter().map(|adapter| adapter.name.to_string());
        names.collect()
    }
}

pub(crate) fn routes() -> Router<Arc<SimEngine>> {
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/load_lora_adapter", post(load))
        .route("/v1/unload_lora_adapter", post(unload))
}

async fn models(State(engine): State<Arc<SimEngine>>) -> Json<Value> {
    let base = &engine.config.model;
    let card = |id: &String, parent: Option<&String>| {
        json!({"id": id, "object": "model", "created": 0, "owned_by": "engine_sim", "root": id, "parent": parent,
               "max_model_len": engine.config.capacity.max_length()})
    };
    let adapters = engine.adapters.names();
    let adapters = adapters.iter().map(|adapter| card(adapter, Some(base)));
    let models: Vec<_> = std::iter::once(card(base, None)).chain(adapters).collect();
    Json(json!({"object": "list", "data": models}))
}

async fn load(
    State(engine): State<Arc<SimEngine>>,
    Json(AdapterName { lora_name: name }): Json<AdapterName>,
) -> Result<String, OpenAiError> {
    if engine.adapters.load(&name) {
        Ok(format!(
            "Success: LoRA adapter '{name}' added successfully."
        ))
    } else {
        let problem = format!("The lora adapter '{name}' has already been loaded.");
        Err(OpenAiError::bad_request(problem))
    }
}

async fn unload(
    State(engine): State<Arc<SimEngine>>,
    Json(AdapterName { lora_name: name }): Json<AdapterName>,
) -> Result<String, OpenAiError> {
    if engine.adapters.unload(&name) {
        Ok(format!(
            "Success: LoRA adapter '{name}' removed successfully."
        ))
    } else {
        let problem = format!("The lora adapter '{name}' cannot be found.");
        Err(OpenAiError::new(StatusCode::NOT_FOUND, problem))
    }
}
