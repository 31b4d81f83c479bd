use serde_json::Value;

/// Merges one configuration into another: objects are merged by key, other values are replaced.
pub fn merge_config(config: &mut Value, over: &Value) {
    match (config, over) {
        (Value::Object(config), Value::Object(over)) => {
            for (key, value) in over {
                merge_config(config.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (config, over) => *config = over.clone(),
    }
}
