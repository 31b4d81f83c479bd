"""What the test of the manifests has Python do: Kubernetes' schemas, and Helm. Reads JSON, writes JSON."""

import json
import sys


def validate(version):
    """Of each object: null where it is right, "no schema", or what is wrong."""
    import kubernetes_validate

    def judge(found):
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            return "no schema"
        except kubernetes_validate.ValidationError as error:
            return f"{error.message} at {'.'.join(map(str, error.path))}"

    return [judge(found) for found in json.load(sys.stdin)]


def render(chart, release, namespace):
    """The templates with the values given, as text by name."""
    import helm_python

    problems = [said for said in helm_python.lint(chart)["messages"] if said["severity"] > 1]
    if problems:
        raise SystemExit(f"helm lint: {problems}")
    with helm_python.Chart.load(chart) as loaded:
        return loaded.render(json.load(sys.stdin), name=release, namespace=namespace)


if __name__ == "__main__":
    print(json.dumps({"validate": validate, "render": render}[sys.argv[1]](*sys.argv[2:])))
