"""Plain Kubernetes: a learner that ends (Job) with its service and volume, and Deployments of workers.

The learner is a Job and not a Deployment: every run has an end, and a Deployment would start a finished learner again,
forever. A learner that fails or is evicted is started again and resumes; one that exits with 2, for a mistake of the
user's, is not.
"""

from __future__ import annotations

from typing import Any

from echelon.kube.options import KubeOptions
from echelon.kube.pods import (
    RUNS,
    Manifest,
    claim,
    labels,
    learner_pod,
    metadata,
    network_policy,
    pod_template,
    secrets,
    worker_pod,
)

STATUS = "/tmp/echelon-status"
WORKER_PORT, HOST_PORT, BULK_PORT = 4444, 7000, 7001
WORKER_GRACE_S = 30
STUCK_MINUTES = 10  # without progress, a worker is started again
USER_MISTAKE = 2  # exit code
DNS: Manifest = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}


def render(options: KubeOptions) -> list[Manifest]:
    gpu_ids: list[int | None] = [*range(options.gpus)] or [None]
    shares = zip(gpu_ids, options.shares(options.workers), strict=True)
    return [
        *secrets(options),
        claim(options),
        _service(options),
        _learner_policy(options),
        _worker_policy(options),
        _learner(options),
        *(_workers(options, gpu_id, num) for gpu_id, num in shares if num),
    ]


def learner_command(options: KubeOptions) -> list[str]:
    """Returns the command of the learner, which starts the run or resumes it."""
    if options.learner_command:
        return list(options.learner_command)
    rest = ["--run-dir", f"{RUNS}/{options.name}", "--auto-resume"]
    if options.workers_kind == "worker":
        return ["echelon", "learner", *options.train, "--address", f"0.0.0.0:{WORKER_PORT}", *rest]
    return ["echelon", "train", *options.train, *hosts_options(options), *rest]


def hosts_options(options: KubeOptions) -> list[str]:
    """Returns the options of a training whose other hosts are the workers.

    With `--min-actors` it does not wait for all of them: one pod that cannot be scheduled would hold up its start.
    """
    is_elastic = any(word.partition("=")[0].replace("_", "-") == "--min-actors" for word in options.train)
    count = [] if is_elastic else ["--hosts", str(options.workers + 1)]
    return [*count, "--hosts.address", f"tcp://0.0.0.0:{HOST_PORT}", "--hosts.bulk-port", str(BULK_PORT)]


def _ports(options: KubeOptions) -> dict[str, int]:
    return {"workers": WORKER_PORT} if options.workers_kind == "worker" else {"hosts": HOST_PORT, "bulk": BULK_PORT}


def _service(options: KubeOptions) -> Manifest:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in _ports(options).items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options, "learner", "learner"),
        "spec": {"selector": labels(options, "learner"), "ports": ports},
    }


def _learner_policy(options: KubeOptions) -> Manifest:
    """Only workers reach the learner, and only its ports; it reaches nothing but the name service."""
    allowed = {
        "from": [{"podSelector": {"matchLabels": labels(options, "worker")}}],
        "ports": [{"protocol": "TCP", "port": port} for port in _ports(options).values()],
    }
    spec = {"policyTypes": ["Ingress", "Egress"], "ingress": [allowed], "egress": [DNS]}
    return network_policy(options, "learner", spec)


def _worker_policy(options: KubeOptions) -> Manifest:
    """Nobody reaches a worker; it reaches the learner and the name service."""
    allowed = {
        "to": [{"podSelector": {"matchLabels": labels(options, "learner")}}],
        "ports": [{"protocol": "TCP", "port": port} for port in _ports(options).values()],
    }
    spec: Manifest = {"policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": [allowed, DNS]}
    return network_policy(options, "worker", spec)


def _learner(options: KubeOptions) -> Manifest:
    name = next(iter(_ports(options)))
    pod = learner_pod(
        options,
        "learner",
        command=learner_command(options),
        ports=[{"name": name, "containerPort": port} for name, port in _ports(options).items()],
        startupProbe=_probe(10, 180, tcpSocket={"port": name}),  # a large replay is loaded before it listens
        readinessProbe=_probe(10, 3, tcpSocket={"port": name}),
        livenessProbe=_probe(30, 10, tcpSocket={"port": name}),
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(options, "learner", "learner"),
        "spec": {
            "backoffLimit": options.retries,
            "podReplacementPolicy": "Failed",  # the old one has left before a new one starts
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "learner", "operator": "In", "values": [USER_MISTAKE]},
                    },
                ]
            },
            "template": pod_template(options, pod, restartPolicy="Never", automountServiceAccountToken=False),
        },
    }


def _workers(options: KubeOptions, gpu_id: int | None, num: int) -> Manifest:
    """Returns the workers of one GPU, or all of them without GPUs."""
    pod = worker_pod(
        options,
        "worker",
        gpu_id,
        WORKER_GRACE_S,
        command=_worker_command(options),
        startupProbe=_probe(2, 150, exec={"command": ["test", "-e", STATUS]}),
        readinessProbe=_probe(5, 2, exec={"command": ["grep", "-q", "joined", STATUS]}),
        livenessProbe=_probe(
            60, 3, exec={"command": ["sh", "-c", f"find {STATUS} -mmin -{STUCK_MINUTES} | grep -q ."]}
        ),
    )
    name = "worker" if gpu_id is None else f"worker-gpu{gpu_id}"
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(options, name, "worker"),
        "spec": {
            "replicas": num,
            "strategy": {"type": "Recreate"},  # never more than these on one GPU
            "selector": {"matchLabels": labels(options, "worker", gpu_id)},
            "template": pod_template(options, pod, automountServiceAccountToken=False),
        },
    }


def _worker_command(options: KubeOptions) -> list[str]:
    learner = f"{options.name}-learner"
    if options.worker_command:
        return list(options.worker_command)
    if options.workers_kind == "worker":
        return ["echelon", "worker", "--learner", f"{learner}:{WORKER_PORT}", "--status-file", STATUS]
    return ["echelon", "host", "--join", f"{learner}:{HOST_PORT}", "--status-file", STATUS]


def _probe(period_s: int, failures: int, **check: Any) -> Manifest:
    return {**check, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}
