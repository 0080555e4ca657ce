"""Renew tests/data/deploy/kubernetes.json, the schemas of the manifests in deploy/.

    python tools/deploy_schemas.py DEFINITIONS CRD

DEFINITIONS: `_definitions.json` of the package kubernetes-validate (Kubernetes' OpenAPI, strict: no other fields).
CRD: `ray-operator/config/crd/bases/ray.io_rayclusters.yaml` of KubeRay. Both are under the Apache License 2.0. Only
what the manifests' kinds refer to is left, without descriptions; KubeRay's copies of a pod template are references.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment", "Service": "io.k8s.api.core.v1.Service",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim", "Secret": "io.k8s.api.core.v1.Secret",
}  # fmt: skip
POD = "io.k8s.api.core.v1.PodTemplateSpec"
FIELDS = ("type", "properties", "items", "required", "enum", "additionalProperties", "$ref", "oneOf", "anyOf", "format",
          "minimum", "maximum")  # fmt: skip
TARGET = Path(__file__).parents[1] / "tests" / "data" / "deploy" / "kubernetes.json"


def compact(schema: Any) -> Any:
    """Return a schema without prose, with short references."""
    if not isinstance(schema, dict):
        return schema
    result = {name: schema[name] for name in FIELDS if name in schema}
    if "$ref" in result:
        result["$ref"] = "#/$defs/" + result["$ref"].rpartition("/")[2]
    for name in ("items", "additionalProperties"):
        if name in result:
            result[name] = compact(result[name])
    for name in ("oneOf", "anyOf"):
        if name in result:
            result[name] = [compact(each) for each in result[name]]
    if "properties" in result:
        result["properties"] = {name: compact(each) for name, each in result["properties"].items()}
    return result


def closed(schema: Any, path: str = "") -> Any:
    """Return a schema of a CRD in which objects have no other fields, with references in place of pod templates."""
    if path.endswith(("GroupSpec.template", "GroupSpecs.template")):
        return {"$ref": f"#/$defs/{POD}"}
    if isinstance(schema, dict) and "properties" in schema:
        fields = {name: closed(each, f"{path}.{name}") for name, each in schema["properties"].items()
                  if f"{path}.{name}" not in (".status", ".metadata")}  # fmt: skip
        if not path:
            fields["metadata"] = {"type": "object"}
        return {**schema, "properties": fields, "additionalProperties": False}
    if isinstance(schema, dict) and "items" in schema:
        return {**schema, "items": closed(schema["items"], path)}
    return schema


def main(definitions: Path, crd: Path) -> None:
    every = json.loads(definitions.read_text("utf-8"))["$defs"]
    needed: dict[str, Any] = {}
    waiting = [*KINDS.values(), POD]
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed[name] = compact(every[name])
            waiting += re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(needed[name]))
    versions = yaml.safe_load(crd.read_text("utf-8"))["spec"]["versions"]
    ray = next(each for each in versions if each["name"] == "v1")["schema"]["openAPIV3Schema"]
    needed["RayCluster"] = compact(closed(ray))
    kinds = {kind: {"$ref": f"#/$defs/{name}"} for kind, name in KINDS.items()}
    document = {"kinds": {**kinds, "RayCluster": {"$ref": "#/$defs/RayCluster"}}, "$defs": dict(sorted(needed.items()))}
    TARGET.write_text(json.dumps(document, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
