"""KubeRay: a RayJob, whose Ray cluster has the learner on its head and workers in one group per GPU."""

from __future__ import annotations

import shlex

from echelon.kube.options import KubeOptions
from echelon.kube.pods import (
    RUNS,
    Manifest,
    claim,
    container_security,
    labels,
    learner_pod,
    metadata,
    network_policy,
    pod_security,
    pod_template,
    secrets,
    worker_pod,
)

RAY_OPTIONS = ["--engine", "ray", "--address", "auto"]
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
WORKER_GRACE_S = 60
KEEP_S = 300  # the cluster of a finished job, to read its logs
IDLE_S = 60  # after which the autoscaler removes a worker that runs no agent


def render(options: KubeOptions) -> list[Manifest]:
    return [*secrets(options), claim(options), _policy(options), _job(options)]


def entrypoint(options: KubeOptions) -> list[str]:
    """Returns the command of the driver, which runs on the head: it starts the run or resumes it."""
    if options.learner_command:
        return list(options.learner_command)
    return ["echelon", "train", *options.train, *RAY_OPTIONS, "--run-dir", f"{RUNS}/{options.name}", "--auto-resume"]


def _policy(options: KubeOptions) -> Manifest:
    """Only pods of this training and the operator reach its pods. The autoscaler reaches the API of the cluster."""
    operator = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    ingress = [
        {"from": [{"podSelector": {"matchLabels": labels(options)}}]},
        {
            "from": [{"namespaceSelector": {}, **operator}],
            "ports": [{"protocol": "TCP", "port": PORTS["dashboard"]}],
        },
    ]
    return network_policy(options, "", {"policyTypes": ["Ingress"], "ingress": ingress})


def _job(options: KubeOptions) -> Manifest:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(options, ""),
        "spec": {
            "entrypoint": shlex.join(entrypoint(options)),
            "submissionMode": "K8sJobMode",
            "backoffLimit": options.retries,  # every retry is a new cluster with the same run folder
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEEP_S,
            "submitterPodTemplate": _submitter(options),
            "rayClusterSpec": _cluster(options),
        },
    }


def _submitter(options: KubeOptions) -> Manifest:
    amounts = {"cpu": "500m", "memory": "1Gi"}
    container = {
        "name": "submitter",
        "image": options.learner_image or options.image,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "metadata": {"labels": labels(options, "submitter")},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": pod_security(),
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    }


def _cluster(options: KubeOptions) -> Manifest:
    ports = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    head = learner_pod(options, "ray-head", ports=ports)
    gpu_ids: list[int | None] = [*range(options.gpus)] or [None]
    most = options.shares(options.workers)
    least = options.shares(options.min_workers or options.workers)
    groups = zip(gpu_ids, least, most, strict=True)
    return {
        "rayVersion": options.ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"idleTimeoutSeconds": IDLE_S, "securityContext": container_security()},
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            "template": pod_template(options, head),
        },
        "workerGroupSpecs": [_group(options, gpu_id, low, high) for gpu_id, low, high in groups if high],
    }


def _group(options: KubeOptions, gpu_id: int | None, least: int, most: int) -> Manifest:
    pod = worker_pod(options, "ray-worker", gpu_id, WORKER_GRACE_S)
    return {
        "groupName": "workers" if gpu_id is None else f"gpu{gpu_id}",
        "replicas": most,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": {},
        "template": pod_template(options, pod),
    }
