"""A JSON schema of the fields of a RayJob (ray.io/v1) that an example may use; every other field is refused.

The names and types are those of KubeRay 1.7. test_cluster_examples.py has a real API server check the example against
KubeRay's own definition. Pods are left out, since Kubernetes' schema describes them.
"""

from typing import Any

Schema = dict[str, Any]

WHOLE: Schema = {"type": "integer", "minimum": 0}
NAME: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
POD: Schema = {"type": "object", "required": ["spec"]}


def _fields(fields: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": fields, "required": list(required)}


GROUP = {"rayStartParams": TEXTS, "template": POD}
SCALED = {"groupName": NAME, "replicas": WHOLE, "minReplicas": WHOLE, "maxReplicas": WHOLE}
CLUSTER = _fields(
    {
        "rayVersion": NAME,
        "headGroupSpec": _fields(GROUP, "template"),
        "workerGroupSpecs": {"type": "array", "items": _fields(GROUP | SCALED, "template", *SCALED)},
    },
    "headGroupSpec",
)
RAY_JOB = _fields(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": _fields(
            {
                "entrypoint": NAME,
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": WHOLE,
                "activeDeadlineSeconds": WHOLE,
                "backoffLimit": WHOLE,
                "runtimeEnvYAML": NAME,
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
                "rayClusterSpec": CLUSTER,
            },
            "entrypoint",
            "rayClusterSpec",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
