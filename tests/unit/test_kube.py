"""`echelon kube render`: what it refuses, and that its objects are valid and have the properties they promise."""

from __future__ import annotations

import contextlib
import functools
import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.cli.main import main
from echelon.kube.yaml_text import to_yaml

ROOT = Path(__file__).resolve().parents[2]
Document = dict[str, Any]
SHOW = ["--image", "registry.example/echelon:1", "--workers", "10", "--gpus", "4"]
NODES = ["--node-selector", "nodetype=phortx", "--learner-node", "nodetype=big", "--learner-gpus", "1"]
SAC = ["--", "sac", "Pendulum-v1", "--episodes", "500"]
IMPALA = ["--", "impala", "CartPole-v1", "--actors", "22", "--minutes", "60"]
CASES = {
    "plain": ["--flavour", "plain", *SHOW, *NODES, *SAC],
    "hosts": ["--flavour", "plain", "--workers-kind", "host", *SHOW, *NODES, *IMPALA],
    "kuberay": ["--flavour", "kuberay", *SHOW, *NODES, *IMPALA],
}
VERSIONS = ("1.29.0", kubernetes_validate.latest_version())  # the oldest that docs/kubernetes.md names, and the newest
# Fields of ray.io/v1 (KubeRay 1.7) and their types, from its API; templates are checked as pod templates.
RAY_JOB = {
    **dict.fromkeys(("entrypoint", "submissionMode", "jobId", "runtimeEnvYAML", "managedBy"), str),
    **dict.fromkeys(("backoffLimit", "ttlSecondsAfterFinished", "activeDeadlineSeconds"), int),
    **dict.fromkeys(("shutdownAfterJobFinishes", "suspend"), bool),
    **dict.fromkeys(("rayClusterSpec", "submitterPodTemplate", "submitterConfig", "deletionStrategy"), dict),
}
RAY_CLUSTER = {
    **dict.fromkeys(("rayVersion", "managedBy"), str),
    **dict.fromkeys(("enableInTreeAutoscaling", "suspend"), bool),
    **dict.fromkeys(("authOptions", "autoscalerOptions", "gcsFaultToleranceOptions", "headGroupSpec"), dict),
    "workerGroupSpecs": list,
}
RAY_HEAD = {"enableIngress": bool, "headService": dict, "rayStartParams": dict, "serviceType": str, "template": dict}
RAY_GROUP = {
    "groupName": str,
    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas", "numOfHosts"), int),
    **dict.fromkeys(("rayStartParams", "scaleStrategy", "template"), dict),
}
RAY_AUTOSCALER = {
    **dict.fromkeys(("image", "imagePullPolicy", "upscalingMode"), str),
    **dict.fromkeys(("env", "envFrom", "volumeMounts"), list),
    **dict.fromkeys(("resources", "securityContext"), dict),
    "idleTimeoutSeconds": int,
}


@functools.cache
def render(*words: str) -> list[Document]:
    """What the command writes, read back."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["kube", "render", *words]) == 0
    return list(yaml.safe_load_all(output.getvalue()))


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def ray_spec(documents: list[Document]) -> Document:
    (job,) = of_kind(documents, "RayJob")
    spec: Document = job["spec"]
    return spec


def templates(documents: list[Document]) -> dict[str, Document]:
    """The templates of all pods, by the component that they are labelled with (and the GPU)."""
    found = [one["spec"]["template"] for one in documents if one["kind"] in ("Job", "Deployment")]
    for one in of_kind(documents, "RayJob"):
        cluster = one["spec"]["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        found += [one["spec"]["submitterPodTemplate"], *(group["template"] for group in groups)]
    named = {}
    for template in found:
        labels = template["metadata"]["labels"]
        named[labels["app.kubernetes.io/component"] + labels.get("echelon/gpu", "")] = template
    assert len(named) == len(found)
    return named


def container_of(template: Document) -> Document:
    (container,) = template["spec"]["containers"]
    found: Document = container
    return found


def values(template: Document) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container_of(template)["env"]}


def validate(document: Document) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


class TestBothFlavours:
    """1 learner and 10 workers on 4 GPUs."""

    @pytest.fixture(params=CASES)
    def documents(self, request: pytest.FixtureRequest) -> list[Document]:
        return render(*CASES[request.param])

    def test_they_are_valid(self, documents: list[Document]) -> None:
        for document in documents:
            if document["kind"] != "RayJob":
                validate(document)
        for template in templates(documents).values():
            validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})

    def test_workers_are_divided_over_the_gpus_and_see_one_each(self, documents: list[Document]) -> None:
        if jobs := of_kind(documents, "RayJob"):
            replicas = [group["replicas"] for group in jobs[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
        else:
            replicas = [one["spec"]["replicas"] for one in of_kind(documents, "Deployment")]
        assert replicas == [3, 3, 2, 2]
        for gpu in range(4):
            seen = values(templates(documents)[f"worker{gpu}"])
            assert seen["NVIDIA_VISIBLE_DEVICES"] == str(gpu)
            assert seen["CUDA_VISIBLE_DEVICES"] == "0", "the one GPU that the container sees has the number 0"

    def test_pods_are_confined(self, documents: list[Document]) -> None:
        for template in templates(documents).values():
            pod, container = template["spec"]["securityContext"], container_of(template)["securityContext"]
            assert pod["runAsNonRoot"] and pod["runAsUser"] > 0
            assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["fsGroupChangePolicy"] == "OnRootMismatch"
            assert container["readOnlyRootFilesystem"] and container["allowPrivilegeEscalation"] is False
            assert container["capabilities"] == {"drop": ["ALL"]} and container["privileged"] is False

    def test_pods_have_requests_limits_and_their_volumes(self, documents: list[Document]) -> None:
        found = templates(documents)
        found.pop("submitter", None)
        for component, template in found.items():
            resources = container_of(template)["resources"]
            assert resources["requests"] == resources["limits"] and {"cpu", "memory"} <= set(resources["limits"])
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            places = {mount["mountPath"]: volumes[mount["name"]] for mount in container_of(template)["volumeMounts"]}
            size = {"learner": "8192Mi"}.get(component, "512Mi")
            assert places["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}
            assert "emptyDir" in places["/tmp"]
            assert ("/runs" in places) == (component == "learner")
        assert container_of(found["learner"])["resources"]["limits"]["nvidia.com/gpu"] == 1
        (claim,) = of_kind(documents, "PersistentVolumeClaim")
        runs = next(volume for volume in found["learner"]["spec"]["volumes"] if volume["name"] == "runs")
        assert runs["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]

    def test_pods_stop_gracefully_and_go_where_they_should(self, documents: list[Document]) -> None:
        found = templates(documents)
        assert found["learner"]["spec"]["terminationGracePeriodSeconds"] == 120
        assert found["learner"]["spec"]["nodeSelector"] == {"nodetype": "big"}
        for gpu in range(4):
            assert found[f"worker{gpu}"]["spec"]["nodeSelector"] == {"nodetype": "phortx"}
            assert found[f"worker{gpu}"]["spec"]["terminationGracePeriodSeconds"] >= 30

    def test_the_secret_is_referred_to_and_never_generated(self, documents: list[Document]) -> None:
        (secret,) = of_kind(documents, "Secret")
        assert len(secret["stringData"]["secret"]) < 16, "Echelon refuses to run with the placeholder"
        for component, template in templates(documents).items():
            if component != "submitter":
                source = next(one for one in container_of(template)["env"] if one["name"] == "ECHELON_SECRET")
                assert source["valueFrom"]["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "secret"}

    def test_all_objects_are_in_the_namespace(self, documents: list[Document]) -> None:
        assert {document["metadata"]["namespace"] for document in documents} == {"default"}


class TestPlain:
    def test_the_learner_resumes_and_ends(self) -> None:
        (job,) = of_kind(render(*CASES["plain"]), "Job")
        command = container_of(job["spec"]["template"])["command"]
        assert command[:4] == ["echelon", "learner", "sac", "Pendulum-v1"] and "--auto-resume" in command
        assert command[command.index("--run-dir") + 1].startswith("/runs/")
        assert job["spec"]["backoffLimit"] == 10 and job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
        ignored, failed = job["spec"]["podFailurePolicy"]["rules"]
        assert ignored["action"] == "Ignore" and ignored["onPodConditions"][0]["type"] == "DisruptionTarget"
        assert failed["action"] == "FailJob" and failed["onExitCodes"]["values"] == [2]

    @pytest.mark.parametrize(("case", "ports"), [("plain", [4444]), ("hosts", [7000, 7001])])
    def test_only_workers_reach_the_learner_and_only_its_ports(self, case: str, ports: list[int]) -> None:
        documents = render(*CASES[case])
        learner, worker = of_kind(documents, "NetworkPolicy")
        labels = {name: template["metadata"]["labels"] for name, template in templates(documents).items()}
        assert learner["spec"]["podSelector"]["matchLabels"].items() <= labels["learner"].items()
        assert not learner["spec"]["podSelector"]["matchLabels"].items() <= labels["worker0"].items()
        (allowed,) = learner["spec"]["ingress"]
        (source,) = allowed["from"]
        assert source["podSelector"]["matchLabels"].items() <= labels["worker3"].items()
        assert [one["port"] for one in allowed["ports"]] == ports
        assert worker["spec"]["podSelector"]["matchLabels"].items() <= labels["worker0"].items()
        assert worker["spec"]["ingress"] == [] and learner["spec"]["policyTypes"] == ["Ingress", "Egress"]
        to_learner, dns = worker["spec"]["egress"]
        assert to_learner["to"][0]["podSelector"]["matchLabels"].items() <= labels["learner"].items()
        assert [one["port"] for one in to_learner["ports"]] == ports
        assert {one["port"] for one in dns["ports"]} == {53} and learner["spec"]["egress"] == [dns]

    @pytest.mark.parametrize("case", ["plain", "hosts"])
    def test_workers_find_the_learner_by_its_service(self, case: str) -> None:
        documents = render(*CASES[case])
        (service,) = of_kind(documents, "Service")
        template = templates(documents)["learner"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        open_ports = {port["name"]: port["containerPort"] for port in container_of(template)["ports"]}
        assert {one["targetPort"]: one["port"] for one in service["spec"]["ports"]} == open_ports
        command = container_of(templates(documents)["worker0"])["command"]
        address = command[command.index("--learner" if case == "plain" else "--join") + 1]
        assert address == f"{service['metadata']['name']}:{next(iter(open_ports.values()))}"

    def test_ready_is_joined(self) -> None:
        found = templates(render(*CASES["plain"]))
        learner = container_of(found["learner"])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert learner[probe]["tcpSocket"] == {"port": "workers"}

    @pytest.mark.parametrize("case", ["plain", "hosts"])
    def test_the_probes_of_a_worker_read_its_status_file(self, case: str, tmp_path: Path) -> None:
        worker = container_of(templates(render(*CASES[case]))["worker0"])
        status = worker["command"][worker["command"].index("--status-file") + 1]
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        here = {
            name: [word.replace(status, str(tmp_path / "status")) for word in worker[name]["exec"]["command"]]
            for name in probes
        }

        def outcomes() -> list[bool]:
            return [subprocess.run(here[name], capture_output=True, timeout=30).returncode == 0 for name in probes]

        assert outcomes() == [False, False, False]
        (tmp_path / "status").write_text("waiting\n")
        assert outcomes() == [True, False, True]
        (tmp_path / "status").write_text("joined\n")
        assert outcomes() == [True, True, True]
        subprocess.run(["touch", "-d", "11 minutes ago", str(tmp_path / "status")], check=True)
        assert outcomes() == [True, True, False]

    def test_a_head_waits_for_all_of_its_hosts(self) -> None:
        command = container_of(templates(render(*CASES["hosts"]))["learner"])["command"]
        assert command[:3] == ["echelon", "train", "impala"] and "--auto-resume" in command
        assert command[command.index("--hosts") + 1] == "11"

    @pytest.mark.parametrize("least", [("--min-actors", "2"), ("--min-actors=2",)])
    def test_a_head_with_least_actors_starts_without_all_of_its_hosts(self, least: tuple[str, ...]) -> None:
        words = ["--flavour", "plain", "--image", "i", "--workers", "4", "--workers-kind", "host"]
        training = ["--", "impala", "CartPole-v1", *least, "--max-actors", "8", "--minutes", "5"]
        command = container_of(templates(render(*words, *training))["learner"])["command"]
        assert "--hosts" not in command and "--hosts.address" in command and "--hosts.bulk-port" in command

    def test_workers_without_gpus_are_one_deployment(self) -> None:
        words = ["--flavour", "plain", "--image", "i", "--workers", "64", "--namespace", "rl", "--name", "run-7"]
        documents = render(*words, "--secret-name", "mine", "--storage-class", "fast", *SAC)
        (deployment,) = of_kind(documents, "Deployment")
        assert deployment["spec"]["replicas"] == 64 and deployment["metadata"]["name"] == "run-7-worker"
        assert values(deployment["spec"]["template"])["NVIDIA_VISIBLE_DEVICES"] == "void"
        assert not of_kind(documents, "Secret") and {one["metadata"]["namespace"] for one in documents} == {"rl"}
        assert of_kind(documents, "PersistentVolumeClaim")[0]["spec"]["storageClassName"] == "fast"

    def test_programs_of_the_users_own_replace_the_commands(self) -> None:
        words = ["--flavour", "plain", "--image", "i", "--learner-command", "python learner.py 'a b'"]
        found = templates(render(*words, "--worker-command", "python worker.py"))
        assert container_of(found["learner"])["command"] == ["python", "learner.py", "a b"]
        assert container_of(found["worker"])["command"] == ["python", "worker.py"]


class TestKubeRay:
    def test_it_has_only_fields_of_the_api(self) -> None:
        spec = ray_spec(render(*CASES["kuberay"]))
        cluster = spec["rayClusterSpec"]
        parts = [(spec, RAY_JOB), (cluster, RAY_CLUSTER), (cluster["headGroupSpec"], RAY_HEAD)]
        parts += [(group, RAY_GROUP) for group in cluster["workerGroupSpecs"]]
        for part, known in [*parts, (cluster["autoscalerOptions"], RAY_AUTOSCALER)]:
            for name, value in part.items():
                assert type(value) is known[name], f"{name}: {value!r}"
        for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())

    def test_it_has_tokens_autoscaling_and_a_retried_job_resumes(self) -> None:
        words = ["--min-workers", "6", "--ray-version", "2.55.1", "--retries", "3", *CASES["kuberay"]]
        spec = ray_spec(render(*words))
        cluster = spec["rayClusterSpec"]
        assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] == "2.55.1"
        assert cluster["enableInTreeAutoscaling"] is True and cluster["autoscalerOptions"]["securityContext"]
        groups = cluster["workerGroupSpecs"]
        bounds = [(group["minReplicas"], group["replicas"], group["maxReplicas"]) for group in groups]
        assert bounds == [(2, 3, 3), (2, 3, 3), (1, 2, 2), (1, 2, 2)]
        assert spec["backoffLimit"] == 3 and spec["shutdownAfterJobFinishes"] is True
        assert spec["entrypoint"].startswith("echelon train impala CartPole-v1 --actors 22 --minutes 60")
        assert spec["entrypoint"].endswith("--engine ray --address auto --run-dir /runs/echelon --auto-resume")

    def test_only_its_own_pods_and_the_operator_reach_it(self) -> None:
        documents = render(*CASES["kuberay"])
        (policy,) = of_kind(documents, "NetworkPolicy")
        own, operator = policy["spec"]["ingress"]
        for template in templates(documents).values():
            assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            assert own["from"][0]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert [one["port"] for one in operator["ports"]] == [8265]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--workers", "13"], "4 GPUs × 3 workers per GPU = 12"),
        (["--gpus", "1", "--workers-per-gpu", "9"], "1 GPUs × 9 workers per GPU = 9"),
        (["--flavour", "helm"], "use plain or kuberay"),
        (["--name", "Run"], "RFC 1123"),
        (["--name", "7runs"], "first a letter"),
        (["--name", "a" * 41], "at most 40"),
        (["--namespace", "my_team"], "--namespace my_team"),
        (["--secret-name", "x-"], "--secret-name x-"),
        (["--image", "a b"], "--image 'a b'"),
        (["--cpu", "0"], "--cpu 0"),
        (["--cpu", "four"], "--cpu four"),
        (["--memory", "16"], "--memory '16'"),
        (["--memory", "16GB"], "--memory '16GB'"),
        (["--learner-shm-size", "16Gi"], "does not fit into a memory of 16Gi"),
        (["--storage-size", "0Gi"], "--storage-size '0Gi'"),
        (["--node-selector", "gpu"], "KEY=VALUE"),
        (["--node-selector", "a b=c"], "not a label"),
        (["--workers", "none"], "--workers"),
        (["--workers", "0"], "at least 1"),
        (["--min-workers", "11"], "--min-workers 11 exceeds"),
        (["--ray-version", "2.9.0"], "at least 2.54.0"),
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--imag", "x"], "--imag"),
        (["--learner-command", "python x.py"], "not both"),
        (["--learner-command", "python 'x.py"], "--learner-command"),
        (["--flavour", "kuberay", "--worker-command", "python x.py"], "--worker-command has no effect"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--flavour", "plain", *SHOW, *words, *SAC]
    assert main(["kube", "render", *command]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and text in shown.err, shown.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sac", "Pendulum-v1"], "would never end"),
        (["impala", "CartPole-v1", "--steps", "9"], "--workers-kind host"),
        (["sac", "Pendulum-v1", "--steps", "9", "--run-dir", "x"], "--run-dir follows from"),
        (["sac", "Pendulum-v1", "--steps", "9", "--no.such", "x"], "no.such"),
        (["sac", "Pendulum-v1", "--steps", "9", "--actors", "3"], "--actors"),
        ([], "give the training after --"),
    ],
)
def test_a_training_that_the_learner_would_refuse_is_refused_here(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kube", "render", "--flavour", "plain", *SHOW, "--", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and text in shown.err, shown.err


def test_missing_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kube", "render", "--image", "i", *SAC]) == 2 and "--flavour" in capsys.readouterr().err
    assert main(["kube", "render", "--flavour", "plain", *SAC]) == 2 and "--image" in capsys.readouterr().err
    assert main(["kube", "draw"]) == 2 and "render" in capsys.readouterr().err


class TestFile:
    TEXT = """
        flavour = "plain"
        image = "registry.example/echelon:1"
        workers = 10
        gpus = 4
        learner-gpus = 1
        train = "sac Pendulum-v1 --episodes 500"
        [node-selector]
        nodetype = "phortx"
        [learner-node]
        nodetype = "big"
    """

    def test_a_file_gives_the_same_bytes_as_flags_which_win(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "kube.toml"
        path.write_text(self.TEXT)
        texts = []
        for words in (CASES["plain"], CASES["plain"], ["--config", str(path)]):
            assert main(["kube", "render", *words]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] == texts[2]
        assert main(["kube", "render", "--config", str(path), "--workers", "12"]) == 0
        assert capsys.readouterr().out.count("replicas: 3\n") == 4

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("worker = 3", "Did you mean workers"),
            ("workers = 'x'", "workers='x'"),
            ("workers =", "is not TOML"),
            ('train = "sac \'x"', "is not a command"),
            ("learner-command = [1]", "learner_command.0=1"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, text: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "kube.toml"
        path.write_text(text)
        assert main(["kube", "render", "--flavour", "plain", "--image", "i", "--config", str(path), *SAC]) == 2
        error = capsys.readouterr().err
        assert shown in error and error.count("\n") == 1

    def test_a_folder_has_one_file_for_each_object(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "manifests"
        words = ["kube", "render", "-o", str(folder), *CASES["plain"]]
        assert main(words) == 0 and main(words) == 0 and capsys.readouterr().out == ""
        names = sorted(path.name for path in folder.iterdir())
        assert "job-echelon-learner.yaml" in names and "deployment-echelon-worker-gpu3.yaml" in names
        fewer = [*words[:4], "--workers-per-gpu", "5", *CASES["plain"]]
        fewer[fewer.index("--gpus") + 1] = "2"
        assert main(fewer) == 2
        assert "deployment-echelon-worker-gpu2.yaml" in capsys.readouterr().err, "it would still be applied"


def test_it_needs_no_torch() -> None:
    words = ["kube", "render", *CASES["plain"]]
    program = f"import sys; from echelon.cli.main import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 0


SCALARS = st.text() | st.integers() | st.booleans() | st.sampled_from(["no", "Null", "1e3", "0x1", "a: b", "- a", "~"])
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@settings(max_examples=40)
@example({"line breaks": "\x85 \u2028 \u2029"})
@given(st.dictionaries(st.text(st.characters(codec="utf-8", exclude_categories=["C"])), TREES, min_size=1))
def test_yaml_is_read_back_as_it_was(data: Document) -> None:
    printable = yaml.reader.Reader.NON_PRINTABLE
    text = to_yaml([data, data])
    if not printable.search(text):
        assert list(yaml.safe_load_all(text)) == [data, data]


def test_the_commands_of_the_documentation_render_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    command = text[text.index("\nechelon kube render") :].partition(" | kubectl")[0]
    (tmp_path / "kube.toml").write_text(text.partition("```toml\n")[2].partition("```")[0])
    words = shlex.split(command.replace("\\\n", " "))[1:]
    shown = []
    for arguments in (words, ["kube", "render", "--config", str(tmp_path / "kube.toml"), "--secret-name", "echelon"]):
        assert main(arguments) == 0, capsys.readouterr().err
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_the_images_are_those_that_the_pods_need() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = text.split("\nFROM ")[1:]
    assert [stage.split()[2] for stage in stages] == ["source", "cpu", "cuda"]
    for stage in stages[1:]:
        assert "USER 1000:1000" in stage and "WORKDIR /runs" in stage and "--constraint constraints.txt" in stage
    copied = [word for line in text.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]]
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    assert set(copied) == kept and all((ROOT / name).exists() for name in copied)
