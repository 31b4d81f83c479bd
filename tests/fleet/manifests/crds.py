"""Extracts the schemas of custom resources that the manifests use from CustomResourceDefinitions into crds.json.gz. Kinds that no FILE defines
keep their stored schema:

    python3 crds.py FILE..

Versions at the last run: Envoy Gateway 1.8.1 with Gateway API 1.5.1 (github.com/envoyproxy/gateway, charts/gateway-helm/charts/crds/crds),
Istio 1.31.4 (istio.io/api, kubernetes/customresourcedefinitions.gen.yaml), v1 of the Gateway API inference extension, Prometheus operator
0.85.0 (github.com/prometheus-operator/prometheus-operator, example/prometheus-operator-crd). Descriptions, formats and
CEL rules are left out. As with `kubectl apply --validate=strict`, an unknown field is an error."""

import gzip
import json
import sys
from pathlib import Path

import yaml

KINDS = {
    "gateway.networking.k8s.io/v1": ["Gateway", "HTTPRoute"],
    "inference.networking.k8s.io/v1": ["InferencePool"],
    "networking.istio.io/v1": ["DestinationRule"],
    "networking.istio.io/v1alpha3": ["EnvoyFilter"],
    "gateway.envoyproxy.io/v1alpha1": [
        "Backend",
        "BackendTrafficPolicy",
        "ClientTrafficPolicy",
        "EnvoyExtensionPolicy",
        "EnvoyProxy",
    ],
    "monitoring.coreos.com/v1": ["PodMonitor", "PrometheusRule", "ServiceMonitor"],
}
STORED = Path(__file__).with_name("crds.json.gz")
COPIED_KEYWORDS = ["type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required"]
COMBINATORS = ["anyOf", "allOf", "oneOf", "not"]


def schema(node, closed):
    """Returns a node as JSON Schema. Branches of anyOf, allOf, oneOf and not allow additional properties, because they name only some of the fields."""
    result = {key: node[key] for key in COPIED_KEYWORDS if key in node}
    if node.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    if node.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    for key in COMBINATORS:
        if key in node:
            branches = node[key]
            result[key] = [schema(branch, False) for branch in branches] if isinstance(branches, list) else schema(branches, False)
    if "items" in node:
        result["items"] = schema(node["items"], closed)
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = schema(node["additionalProperties"], closed)
    elif "properties" in node:
        result["properties"] = {name: schema(field, closed) for name, field in node["properties"].items()}
        if closed and not node.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    return result


def definitions(files):
    for file in files:
        for document in yaml.load_all(Path(file).read_text(), Loader=yaml.CSafeLoader):
            if document and document["kind"] == "CustomResourceDefinition":
                yield document["spec"]


def extract(files):
    found = json.loads(gzip.decompress(STORED.read_bytes())) if STORED.exists() else {}
    for spec in definitions(files):
        for version in spec["versions"]:
            api, kind = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            if kind in KINDS.get(api, []):
                fields = version["schema"]["openAPIV3Schema"]["properties"]
                found[f"{api} {kind}"] = schema(fields["spec"], True)
    missing = {f"{api} {kind}" for api, kinds in KINDS.items() for kind in kinds} - set(found)
    assert not missing, missing
    return found


if __name__ == "__main__":
    text = json.dumps(extract(sys.argv[1:]), sort_keys=True, separators=(",", ":"))
    STORED.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
