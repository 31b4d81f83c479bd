"""Holds objects against Kubernetes' schemas of a version: reads a list of them as JSON, and writes as JSON of each null where it
is right, "no schema", or what is wrong."""

import json
import sys

import kubernetes_validate


def validate(objects, version):
    def judge(found):
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            return "no schema"
        except kubernetes_validate.ValidationError as error:
            return f"{error.message} at {'.'.join(map(str, error.path))}"

    return [judge(found) for found in objects]


if __name__ == "__main__":
    print(json.dumps(validate(json.load(sys.stdin), sys.argv[1])))
