"""The manifest for KubeRay, against the documented fields of a RayJob.

The schema is written by hand from the reference of KubeRay's API (ray.io/v1, of version 1.7) and
of Kubernetes' pods, as far as the manifest uses them: a field that is misspelt, or of another
type, is refused.
"""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

MANIFEST = Path(__file__).parents[3] / "deploy" / "kuberay" / "rayjob.yaml"


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


TEXT, COUNT, TRUTH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
CONTAINER = fields(
    "name",
    "image",
    name=TEXT,
    image=TEXT,
    env=listed(fields("name", "value", name=TEXT, value=TEXT)),
    resources=fields(requests=TEXTS, limits=TEXTS),
    volumeMounts=listed(fields("name", "mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = fields(
    "name",
    name=TEXT,
    persistentVolumeClaim=fields("claimName", claimName=TEXT),
    emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=TEXT),
)
TEMPLATE = fields(
    "spec",
    spec=fields(
        "containers",
        containers=listed(CONTAINER),
        volumes=listed(VOLUME),
        terminationGracePeriodSeconds=COUNT,
    ),
)
WORKERS = fields(
    *("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
CLUSTER = fields(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=fields(mode=one_of("disabled", "token")),
    headGroupSpec=fields("template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=listed(WORKERS),
)
RAY_JOB = fields(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields("name", name=TEXT),
    spec=fields(
        entrypoint=TEXT,
        shutdownAfterJobFinishes=TRUTH,
        ttlSecondsAfterFinished=COUNT,
        backoffLimit=COUNT,
        submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
        rayClusterSpec=CLUSTER,
    ),
)


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load(MANIFEST.read_text())


def test_the_manifest_has_the_fields_of_a_ray_job(manifest: Any) -> None:
    jsonschema.validate(manifest, RAY_JOB)


def test_a_field_that_is_misspelt_is_refused(manifest: Any) -> None:
    group = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    group["maxReplica"] = group.pop("maxReplicas")
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(manifest, RAY_JOB)


def test_it_launches_on_a_volume_that_all_pods_mount(manifest: Any) -> None:
    spec = manifest["spec"]
    assert "cd /runs && exec lrlhf launch --cluster" in spec["entrypoint"]
    cluster = spec["rayClusterSpec"]
    templates = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in templates):
        (claim,) = [one["name"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
        for container in pod["containers"]:
            mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
            assert mounts["/runs"] == claim


def test_a_job_that_is_stopped_has_time_for_a_step_and_a_checkpoint(manifest: Any) -> None:
    head = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    given = {one["name"]: one["value"] for one in head["env"]}
    assert int(given["RAY_JOB_STOP_WAIT_TIME_S"]) >= 300
