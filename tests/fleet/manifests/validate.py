"""Validates objects against the schemas of a Kubernetes version and of the custom resources in crds.json.gz. Reads a list of objects as JSON.
Writes a list as JSON: null for a valid object, "no schema", or the error."""

import gzip
import json
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate


def message(error):
    return f"{error.message} at {'.'.join(map(str, error.path))}"


def validate(objects, version):
    crds = json.loads(gzip.decompress(Path(__file__).with_name("crds.json.gz").read_bytes()))

    def check(obj):
        crd = crds.get(f"{obj['apiVersion']} {obj['kind']}")
        if crd is not None:
            error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(crd).iter_errors(obj["spec"]))
            return message(error) if error else None
        try:
            kubernetes_validate.validate(obj, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            return "no schema"
        except kubernetes_validate.ValidationError as error:
            return message(error)

    return [check(obj) for obj in objects]


if __name__ == "__main__":
    print(json.dumps(validate(json.load(sys.stdin), sys.argv[1])))
