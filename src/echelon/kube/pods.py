"""What the pods of both flavours share: labels, volumes, environment, security contexts, resources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from echelon.kube.options import KubeOptions, num_cpus

Manifest = dict[str, Any]

USER = 1000  # of the images of the Dockerfile
RUNS = "/runs"  # where the volume with the run folder is
STATE = f"{RUNS}/.state"  # the key that marks run folders as the user's own must outlive a pod
GPU_RESOURCE = "nvidia.com/gpu"
TMP_SIZE = "2Gi"
PLACEHOLDER = "REPLACE-ME"  # too short for a secret: Echelon refuses it


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """One kind of pod: what runs in it, and what it needs."""

    component: str  # learner or worker
    container: str
    image: str
    cpu: str
    memory: str
    shm: str
    node: Mapping[str, str]
    grace_s: int
    gpus: int = 0  # of its own
    gpu_id: int | None = None  # shared with other pods
    has_run_folder: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more fields of the container


def learner_pod(options: KubeOptions, container: str, **fields: Any) -> Pod:
    return Pod(
        "learner",
        container,
        options.learner_image or options.image,
        options.learner_cpu,
        options.learner_memory,
        options.learner_shm,
        options.learner_node,
        options.grace_s,
        gpus=options.learner_gpus,
        has_run_folder=True,
        fields=fields,
    )


def worker_pod(options: KubeOptions, container: str, gpu_id: int | None, grace_s: int, **fields: Any) -> Pod:
    return Pod(
        "worker",
        container,
        options.image,
        options.cpu,
        options.memory,
        options.shm,
        options.node_selector,
        grace_s,
        gpu_id=gpu_id,
        fields=fields,
    )


def labels(options: KubeOptions, component: str = "", gpu_id: int | None = None) -> dict[str, str]:
    """Returns the labels of an object, by which policies, services and deployments select its pods."""
    found = {"app.kubernetes.io/name": "echelon", "app.kubernetes.io/instance": options.name}
    if component:
        found["app.kubernetes.io/component"] = component
    if gpu_id is not None:
        found["echelon/gpu"] = str(gpu_id)
    return found


def metadata(options: KubeOptions, suffix: str, component: str = "") -> Manifest:
    return {
        "name": f"{options.name}-{suffix}" if suffix else options.name,
        "namespace": options.namespace,
        "labels": labels(options, component),
    }


def pod_template(options: KubeOptions, pod: Pod, **spec: Any) -> Manifest:
    """Returns the template of a pod with one container, which is not root and writes only to its volumes."""
    uses_gpu = pod.gpus > 0 or pod.gpu_id is not None
    return {
        "metadata": {"labels": labels(options, pod.component, pod.gpu_id)},
        "spec": {
            **spec,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": pod.grace_s,
            "securityContext": pod_security(),
            **({"runtimeClassName": options.runtime_class} if options.runtime_class and uses_gpu else {}),
            **({"nodeSelector": dict(pod.node)} if pod.node else {}),
            **({"tolerations": [{"key": GPU_RESOURCE, "operator": "Exists"}]} if uses_gpu else {}),
            "containers": [_container(options, pod)],
            "volumes": _volumes(options, pod),
        },
    }


def pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",  # else every start makes private files readable for the group
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _container(options: KubeOptions, pod: Pod) -> Manifest:
    amounts: Manifest = {"cpu": pod.cpu, "memory": pod.memory}
    if pod.gpus:
        amounts[GPU_RESOURCE] = pod.gpus
    mounts = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if pod.has_run_folder:
        mounts.append({"name": "runs", "mountPath": RUNS})
    return {
        "name": pod.container,
        "image": pod.image,
        **pod.fields,
        "env": _environment(options, pod),
        "resources": {"requests": amounts, "limits": amounts},  # equal: such pods are the last to be evicted
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }


def _environment(options: KubeOptions, pod: Pod) -> list[Manifest]:
    values = {"HOME": "/tmp", "OMP_NUM_THREADS": str(num_cpus(pod.cpu))}
    if pod.has_run_folder:
        values["XDG_STATE_HOME"] = STATE
    if pod.gpu_id is not None:
        # The container sees this one GPU, and CUDA numbers what it sees from 0.
        values |= {"NVIDIA_VISIBLE_DEVICES": str(pod.gpu_id), "CUDA_VISIBLE_DEVICES": "0"}
    elif not pod.gpus:
        values["NVIDIA_VISIBLE_DEVICES"] = "void"  # images of CUDA ask for all GPUs
    secret = {"secretKeyRef": {"name": options.secret, "key": "secret"}}
    return [
        {"name": "ECHELON_SECRET", "valueFrom": secret},
        *({"name": name, "value": value} for name, value in values.items()),
    ]


def _volumes(options: KubeOptions, pod: Pod) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.shm}},
        {"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}},
    ]
    if pod.has_run_folder:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": f"{options.name}-runs"}})
    return volumes


def claim(options: KubeOptions) -> Manifest:
    """Returns the claim of the volume with the run folder."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(options, "runs"),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **({"storageClassName": options.storage_class} if options.storage_class else {}),
            "resources": {"requests": {"storage": options.storage_size}},
        },
    }


def secrets(options: KubeOptions) -> list[Manifest]:
    """Returns the Secret with a placeholder, which the user replaces; none if the user names an existing one."""
    if options.secret_name:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata(options, "secret"),
            "type": "Opaque",
            "stringData": {"secret": PLACEHOLDER},
        }
    ]


def network_policy(options: KubeOptions, component: str, spec: Manifest) -> Manifest:
    """Returns a policy for the pods of a component, or for all pods of the training."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(options, component, component),
        "spec": {"podSelector": {"matchLabels": labels(options, component)}, **spec},
    }
