//! Namespace of one case, with its service account, Role, pools and pods.

use std::sync::Arc;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::admin_client::collection;
use crate::control_plane::{AuditRecord, INFERENCE_POOLS, ResourceDefinition, TestControlPlane};
use crate::objects::{POOL, engine_labels, inference_pool, manifest, pod, running};
use crate::router::{MountedAccount, RouterOptions, RouterProcess};

const RBAC: &str = include_str!("../../deploy/base/rbac.yaml");
const RBAC_API: &str = "rbac.authorization.k8s.io/v1";

/// Rules of the Role in a namespace.
#[derive(Clone, Debug)]
pub(crate) enum RoleRules {
    /// The rules of the shipped Role.
    Shipped,
    /// The shipped rules and the commented-out rule for the optional kinds.
    WithOptionalKinds,
    /// Other rules.
    Rules(Value),
}

/// Returns a rule of a Role.
pub(crate) fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": verbs})
}

/// Returns rules for pods and pools.
pub(crate) fn rules_with(pod_verbs: &[&str], pool_verbs: &[&str]) -> RoleRules {
    let pods = (!pod_verbs.is_empty()).then(|| rule("", &["pods"], pod_verbs));
    let pools = rule(
        "inference.networking.k8s.io",
        &["inferencepools"],
        pool_verbs,
    );
    let pools = (!pool_verbs.is_empty()).then_some(pools);
    RoleRules::Rules(pods.into_iter().chain(pools).collect())
}

/// The verbs of the shipped Role.
pub(crate) const READ: [&str; 3] = ["get", "list", "watch"];

/// A namespace with a service account for warmroute.
pub(crate) struct TestNamespace {
    pub(crate) plane: Arc<TestControlPlane>,
    pub(crate) name: String,
}

impl TestNamespace {
    /// Creates a namespace with the shipped Role.
    pub(crate) async fn create(plane: &Arc<TestControlPlane>) -> anyhow::Result<Self> {
        Self::create_with(plane, RoleRules::Shipped).await
    }

    pub(crate) async fn create_with(
        plane: &Arc<TestControlPlane>,
        rules: RoleRules,
    ) -> anyhow::Result<Self> {
        let name = format!("inference-{}", plane.next_serial());
        let namespace = Self {
            plane: plane.clone(),
            name,
        };
        let object = json!({"metadata": {"name": namespace.name}});
        plane.admin.create("/api/v1/namespaces", &object).await?;
        // Pods are rejected without this account. In a real cluster, a controller creates it.
        namespace
            .create_object(
                "v1",
                "serviceaccounts",
                &json!({"metadata": {"name": "default"}}),
            )
            .await?;
        for object in manifest(RBAC, &namespace.name)? {
            let (api, plural) = match object["kind"].as_str() {
                Some("ServiceAccount") => ("v1", "serviceaccounts"),
                Some("Role") => (RBAC_API, "roles"),
                _ => (RBAC_API, "rolebindings"),
            };
            let path = format!("{}/warmroute", namespace.path(api, plural));
            plane.admin.apply(&path, &object.to_string()).await?;
        }
        namespace.set_rules(rules).await?;
        Ok(namespace)
    }

    /// Replaces the rules of the Role.
    pub(crate) async fn set_rules(&self, rules: RoleRules) -> anyhow::Result<()> {
        let rules = match rules {
            RoleRules::Rules(rules) => rules,
            RoleRules::Shipped => shipped_rules(RBAC)?,
            RoleRules::WithOptionalKinds => {
                let text = RBAC.replace("# - apiGroups:", "- apiGroups:");
                let text = text
                    .replace("#   resources:", "  resources:")
                    .replace("#   verbs:", "  verbs:");
                shipped_rules(&text)?
            }
        };
        let path = format!("{}/warmroute", self.path(RBAC_API, "roles"));
        self.plane
            .admin
            .patch(&path, &json!({"rules": rules}))
            .await?;
        Ok(())
    }

    pub(crate) fn path(&self, api: &str, plural: &str) -> String {
        collection(api, Some(&self.name), plural)
    }

    pub(crate) fn object_path(&self, definition: ResourceDefinition, name: &str) -> String {
        format!("{}/{name}", self.path(definition.api, definition.plural))
    }

    pub(crate) async fn create_object(
        &self,
        api: &str,
        plural: &str,
        object: &Value,
    ) -> anyhow::Result<Value> {
        self.plane
            .admin
            .create(&self.path(api, plural), object)
            .await
    }

    pub(crate) async fn create_of(
        &self,
        definition: ResourceDefinition,
        object: &Value,
    ) -> anyhow::Result<Value> {
        self.create_object(definition.api, definition.plural, object)
            .await
    }

    pub(crate) async fn change_of(
        &self,
        definition: ResourceDefinition,
        name: &str,
        change: &Value,
    ) -> anyhow::Result<Value> {
        self.plane
            .admin
            .patch(&self.object_path(definition, name), change)
            .await
    }

    pub(crate) async fn delete_of(
        &self,
        definition: ResourceDefinition,
        name: &str,
    ) -> anyhow::Result<Value> {
        self.plane
            .admin
            .delete(&self.object_path(definition, name))
            .await
    }

    /// Creates the InferencePool of the shipped manifests with these ports.
    pub(crate) async fn create_pool(&self, ports: &[u16]) -> anyhow::Result<()> {
        self.create_of(
            INFERENCE_POOLS,
            &inference_pool(POOL, &engine_labels(), ports),
        )
        .await?;
        Ok(())
    }

    /// Creates a pod of the pool without a status.
    pub(crate) async fn create_pending(&self, name: &str) -> anyhow::Result<()> {
        self.create_object("v1", "pods", &pod(name, &engine_labels()))
            .await?;
        Ok(())
    }

    /// Creates a ready pod of the pool.
    pub(crate) async fn create_pod(&self, name: &str, ip: &str) -> anyhow::Result<()> {
        self.create_pod_with(name, ip, &engine_labels()).await
    }

    pub(crate) async fn create_pod_with(
        &self,
        name: &str,
        ip: &str,
        labels: &Value,
    ) -> anyhow::Result<()> {
        self.create_object("v1", "pods", &pod(name, labels)).await?;
        self.set_status(name, &running(&[ip], true)).await
    }

    /// Changes the status of a pod.
    pub(crate) async fn set_status(&self, name: &str, status: &Value) -> anyhow::Result<()> {
        let path = format!("{}/{name}/status", self.path("v1", "pods"));
        self.plane.admin.patch(&path, status).await?;
        Ok(())
    }

    pub(crate) async fn change_pod(&self, name: &str, change: &Value) -> anyhow::Result<()> {
        self.plane
            .admin
            .patch(&format!("{}/{name}", self.path("v1", "pods")), change)
            .await?;
        Ok(())
    }

    /// Deletes a pod gracefully. Without a kubelet, it stays until [`Self::remove_pod`].
    pub(crate) async fn delete_pod(&self, name: &str) -> anyhow::Result<()> {
        self.plane
            .admin
            .delete(&format!("{}/{name}", self.path("v1", "pods")))
            .await?;
        Ok(())
    }

    /// Deletes a pod without a grace period.
    pub(crate) async fn remove_pod(&self, name: &str) -> anyhow::Result<()> {
        self.plane
            .admin
            .delete(&format!(
                "{}/{name}?gracePeriodSeconds=0",
                self.path("v1", "pods")
            ))
            .await?;
        Ok(())
    }

    /// Creates a token of the service account, as for a pod.
    pub(crate) async fn token(&self) -> anyhow::Result<String> {
        let path = format!("{}/warmroute/token", self.path("v1", "serviceaccounts"));
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let answer = self.plane.admin.create(&path, &request).await?;
        Ok(answer["status"]["token"]
            .as_str()
            .context("no token")?
            .to_owned())
    }

    /// Revokes all tokens of the service account.
    pub(crate) async fn revoke_tokens(&self) -> anyhow::Result<()> {
        let path = self.path("v1", "serviceaccounts");
        self.plane
            .admin
            .delete(&format!("{path}/warmroute"))
            .await?;
        self.plane
            .admin
            .create(&path, &json!({"metadata": {"name": "warmroute"}}))
            .await?;
        Ok(())
    }

    /// Returns the service account files that a kubelet would mount.
    pub(crate) async fn account(&self) -> anyhow::Result<MountedAccount> {
        let ca = self.plane.authority.cert.clone();
        Ok(MountedAccount {
            token: self.token().await?,
            ca,
            namespace: self.name.clone(),
        })
    }

    /// Starts warmroute with the shipped configuration and waits for its admin listener.
    pub(crate) async fn start_router(&self) -> anyhow::Result<RouterProcess> {
        self.start_router_with(json!({})).await
    }

    /// Like [`Self::start_router`], with `config` merged into the configuration.
    pub(crate) async fn start_router_with(&self, config: Value) -> anyhow::Result<RouterProcess> {
        RouterProcess::start(self.options(config).await?).await
    }

    pub(crate) async fn options(&self, config: Value) -> anyhow::Result<RouterOptions> {
        let account = Some(self.account().await?);
        Ok(RouterOptions {
            api_server: self.plane.address,
            account,
            config,
            dir: self.plane.dir().to_owned(),
        })
    }

    /// Returns all requests of warmroute so far.
    pub(crate) fn audit(&self) -> anyhow::Result<Vec<AuditRecord>> {
        self.plane.audit(&self.name)
    }
}

fn shipped_rules(text: &str) -> anyhow::Result<Value> {
    let objects = manifest(text, "inference")?;
    let role = objects
        .iter()
        .find(|object| object["kind"] == "Role")
        .context("rbac.yaml has no Role")?;
    Ok(role["rules"].clone())
}
