"""The options of `echelon kube render`, and their checks: one field for each flag and each key of its file."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import field

from echelon.errors import ConfigError
from echelon.fields import Section, doc, fields, guess, require

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # of RFC 1123
KEY_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")  # of a label of a node
MAX_NAME, MAX_LABEL, MAX_SUBDOMAIN = 40, 63, 253
CPU = re.compile(r"(\d+)(\.\d{1,3})?|(\d+)m")
SIZE = re.compile(r"(\d+)(Mi|Gi|Ti|M|G|T)")
UNITS = {"M": 10**6, "G": 10**9, "T": 10**12, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)
VERSION = re.compile(r"\d+\.\d+\.\d+")
COMMANDS = ("train", "learner_command", "worker_command")  # fields that a file may also give as one text
MIN_RAY = (2, 54)  # older ones have holes that token authentication does not close


class KubeOptions(Section, frozen=True):
    """The options of `echelon kube render`."""

    flavour: Annotated[Literal["plain", "kuberay"], doc("plain Kubernetes objects, or a RayJob for KubeRay")]
    image: Annotated[str, doc("image of the workers, and of the learner unless --learner-image is given")]
    train: Annotated[tuple[str, ...], doc("the training: PRESET ENV and its options")] = ()
    learner_command: Annotated[tuple[str, ...], doc("command of the learner, if it is a program of your own")] = ()
    worker_command: Annotated[tuple[str, ...], doc("plain: command of a worker, if it is a program of your own")] = ()
    learner_image: Annotated[str, doc("image of the learner")] = ""
    name: Annotated[str, doc("name of the training; every object's name begins with it")] = "echelon"
    namespace: Annotated[str, doc("namespace of all objects; it must exist")] = "default"
    workers: Annotated[int, doc("number of workers", ge=1)] = 1
    workers_kind: Annotated[
        Literal["worker", "host"],
        doc("plain: what a worker runs: `echelon worker`, for presets with replay, or `echelon host`"),
    ] = "worker"
    gpus: Annotated[int, doc("GPUs that the workers share, with the ids 0 to N-1; 0: none", ge=0, le=64)] = 0
    workers_per_gpu: Annotated[int, doc("workers on one GPU, at most", ge=1)] = 3
    min_workers: Annotated[int, doc("kuberay: workers that the autoscaler keeps; 0: all", ge=0)] = 0
    node_selector: Annotated[dict[str, str], doc("label that nodes of workers have")] = field(default_factory=dict)
    learner_node: Annotated[dict[str, str], doc("label that the node of the learner has")] = field(default_factory=dict)
    cpu: Annotated[str, doc("processors of a worker")] = "1"
    memory: Annotated[str, doc("memory of a worker, with its shared memory")] = "2Gi"
    shm_size: Annotated[str, doc("/dev/shm of a worker (default: a quarter of its memory)")] = ""
    learner_cpu: Annotated[str, doc("processors of the learner")] = "4"
    learner_memory: Annotated[str, doc("memory of the learner, with its shared memory")] = "16Gi"
    learner_shm_size: Annotated[str, doc("/dev/shm of the learner: replay, rings (default: half of its memory)")] = ""
    learner_gpus: Annotated[int, doc("GPUs of the learner (nvidia.com/gpu)", ge=0)] = 0
    storage_class: Annotated[str, doc("class of the volume of the run folder (default: the cluster's)")] = ""
    storage_size: Annotated[str, doc("size of the volume of the run folder")] = "10Gi"
    secret_name: Annotated[
        str, doc("existing Secret whose key `secret` is the ECHELON_SECRET (default: render a placeholder)")
    ] = ""
    runtime_class: Annotated[str, doc("runtime class of pods with GPUs, such as nvidia")] = ""
    grace_s: Annotated[int, doc("time for the final checkpoint of a stopped learner", "s", ge=1)] = 120
    retries: Annotated[int, doc("how often a failed learner is started again", ge=0)] = 10
    ray_version: Annotated[str, doc("kuberay: version of Ray in the image")] = "2.60.0"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_names()
        self._check_sizes()
        require(
            bool(self.train) != bool(self.learner_command),
            "give the training after --, as in `echelon kube render … -- sac Pendulum-v1 --episodes 500`, or a "
            "--learner-command of your own, not both.",
        )
        require(
            self.flavour == "plain" or not self.worker_command,
            "--worker-command has no effect: Ray starts the workers of KubeRay. Remove it.",
        )
        require(
            self.gpus == 0 or self.workers <= self.gpus * self.workers_per_gpu,
            f"{self.workers} workers do not fit: {self.gpus} GPUs × {self.workers_per_gpu} workers per GPU = "
            f"{self.gpus * self.workers_per_gpu}. Lower --workers, or raise --gpus or --workers-per-gpu.",
        )
        require(
            self.min_workers <= self.workers,
            f"--min-workers {self.min_workers} exceeds --workers {self.workers}. Lower it.",
        )
        version = VERSION.fullmatch(self.ray_version)
        require(
            version is not None and tuple(map(int, self.ray_version.split(".")[:2])) >= MIN_RAY,
            f"--ray-version {self.ray_version} does not fit: write the version of the image, at least "
            f"{MIN_RAY[0]}.{MIN_RAY[1]}.0.",
        )

    def _check_names(self) -> None:
        require(
            _is_label(self.name) and len(self.name) <= MAX_NAME and self.name[0].isalpha(),
            f"--name {self.name} does not fit: use at most {MAX_NAME} lower-case letters, digits and '-', first a "
            "letter, last no '-' (RFC 1123).",
        )
        require(
            _is_label(self.namespace),
            f"--namespace {self.namespace} does not fit: use at most {MAX_LABEL} lower-case letters, digits and '-', "
            "first and last no '-' (RFC 1123).",
        )
        for option in ("secret_name", "storage_class", "runtime_class"):
            value = getattr(self, option)
            require(
                not value or (len(value) <= MAX_SUBDOMAIN and all(map(_is_label, value.split(".")))),
                f"{_flag(option)} {value} does not fit: use lower-case letters, digits, '-' and '.' (RFC 1123).",
            )
        for option in ("image", "learner_image"):
            value = getattr(self, option)
            require(
                IMAGE.fullmatch(value) is not None or (not value and option != "image"),
                f"{_flag(option)} {value!r} is not an image: write it as REGISTRY/NAME:TAG.",
            )
        for option in ("node_selector", "learner_node"):
            for key, value in getattr(self, option).items():
                require(
                    _is_label_key(key) and (not value or _is_label_value(value)),
                    f"{_flag(option)} {key}={value} is not a label of a node: write KEY=VALUE, as in nodetype=gpu.",
                )

    def _check_sizes(self) -> None:
        for option in ("cpu", "learner_cpu"):
            value = getattr(self, option)
            require(
                CPU.fullmatch(value) is not None and any(digit in value for digit in "123456789"),
                f"{_flag(option)} {value} is not a number of processors: write 2, 0.5 or 500m.",
            )
        for option in ("memory", "learner_memory", "storage_size", "shm_size", "learner_shm_size"):
            value = getattr(self, option)
            require(
                (not value and option.endswith("shm_size"))
                or (SIZE.fullmatch(value) is not None and num_bytes(value) > 0),
                f"{_flag(option)} {value!r} is not a size: write a whole number with a unit, such as 512Mi or 16Gi.",
            )
        for shared, whole in ((self.shm, self.memory), (self.learner_shm, self.learner_memory)):
            require(
                num_bytes(shared) < num_bytes(whole),
                f"/dev/shm of {shared} does not fit into a memory of {whole}, which the processes use, too. Raise the "
                "memory or lower the size.",
            )

    @property
    def shm(self) -> str:
        """The size of /dev/shm of a worker; a host agent has a ring of trajectories there."""
        return self.shm_size or _part(self.memory, 4)

    @property
    def learner_shm(self) -> str:
        """The size of /dev/shm of the learner; the replay or the ring of trajectories is there, and the weights."""
        return self.learner_shm_size or _part(self.learner_memory, 2)

    @property
    def secret(self) -> str:
        return self.secret_name or f"{self.name}-secret"

    def shares(self, count: int) -> list[int]:
        """Returns how many of `count` workers each GPU gets, evenly; one share without GPUs."""
        num = max(1, self.gpus)
        return [count // num + (index < count % num) for index in range(num)]


def read_options(path: str, flags: Mapping[str, Any]) -> KubeOptions:
    """Returns the options of a TOML file (none without a path) and of the command line, which win."""
    found: dict[str, Any] = {}
    known = {option.name: _flag(option.name).removeprefix("--") for option in fields(KubeOptions)}
    for key, value in (_read_toml(path) if path else {}).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: there is no option {key!r}.{guess(name, known)}")
        found[name] = _words(key, value) if name in COMMANDS and isinstance(value, str) else value
    found |= flags
    for name, remedy in (("flavour", "plain or kuberay"), ("image", "docs/kubernetes.md shows how to build one")):
        if name not in found:
            raise ConfigError(f"give {_flag(name)}: {remedy}.")
    return KubeOptions(**found)


def _words(key: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{key} = {text!r} is not a command: {error}. Write it as in a shell.") from error


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.") from error


def num_bytes(size: str) -> int:
    """Returns the bytes of a size such as 16Gi."""
    found = SIZE.fullmatch(size)
    assert found is not None, size
    return int(found[1]) * UNITS[found[2]]


def num_cpus(cpu: str) -> int:
    """Returns the number of whole processors that a number such as 500m needs."""
    return math.ceil(int(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu))


def _part(size: str, divisor: int) -> str:
    return f"{max(1, num_bytes(size) // divisor // UNITS['Mi'])}Mi"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_label(text: str) -> bool:
    return len(text) <= MAX_LABEL and LABEL.fullmatch(text) is not None


def _is_label_value(text: str) -> bool:
    return len(text) <= MAX_LABEL and KEY_NAME.fullmatch(text) is not None


def _is_label_key(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    return _is_label_value(name) and (
        not slash or (len(prefix) <= MAX_SUBDOMAIN and all(map(_is_label, prefix.split("."))))
    )
