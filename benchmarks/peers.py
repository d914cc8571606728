"""Trains the same task with Echelon and its peers on this machine, and compares their speed.

Every peer runs alone, for the same time, in interleaved rounds (A B C, C B A, ...), so that a machine that becomes
slower or faster during the comparison favours none of them. The script needs only the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from steady import steady_rate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS_HOME = ROOT / ".venv-peers"
DISTURBED_CORES = 0.1  # a round in which other programs use more is marked
START_ALLOWANCE_S = 180.0  # for starting and ending processes, before a run counts as hung


class PeerError(Exception):
    """A peer could not be installed or did not train."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of the table: a command and its virtual environment."""

    name: str
    home: str = ""  # folder under .venv-peers and the name of the requirements file; "": Echelon's own .venv
    command: tuple[str, ...] = ()  # script and fixed arguments

    @property
    def python(self) -> Path:
        return (PEERS_HOME / self.home if self.home else ROOT / ".venv") / "bin" / "python"


@dataclass(slots=True)
class Score:
    """The results of a peer, one entry per round."""

    rates: list[float] = field(default_factory=list)
    returns: list[float | None] = field(default_factory=list)
    foreign_cores: list[float] = field(default_factory=list)  # used by other programs during the round
    limit: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


PEERS = (
    Peer("echelon"),
    Peer("sample-factory", "sample-factory", ("sample_factory_cartpole.py",)),
    Peer("sb3-1-epoch", "stable-baselines3", ("sb3_cartpole.py", "--epochs", "1")),
    Peer("sb3-4-epochs", "stable-baselines3", ("sb3_cartpole.py", "--epochs", "4")),
)


def install(peer: Peer) -> None:
    """Creates the peer's virtual environment unless it already matches its requirements file."""
    if not peer.home:
        if not (ROOT / ".venv" / "bin" / "echelon").exists():
            raise PeerError(f"{ROOT / '.venv'} has no echelon command. Run `make demo` or `make test` once first.")
        return
    requirements = HERE / f"requirements-{peer.home}.txt"
    stamp = PEERS_HOME / peer.home / ".requirements"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    pip = [str(peer.python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    print(f"{peer.home}: installing into {PEERS_HOME / peer.home} (once)", flush=True)
    for command in (
        [sys.executable, "-m", "venv", str(PEERS_HOME / peer.home)],
        [*pip, torch],  # first and alone, so that no other package chooses the build
        [*pip, "-r", str(requirements)],
    ):
        if subprocess.run(command, check=False).returncode != 0:
            raise PeerError(
                f"{peer.home}: `{' '.join(command)}` failed under Python {platform.python_version()}; see above. "
                "The pins are known to work on Python 3.11."
            )
    stamp.write_text(digest)


def foreign_cpu_s() -> float:
    """Returns the CPU seconds of this machine, except those of this script's processes."""
    user, nice, system = (int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:4])
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - ours.ru_utime - ours.ru_stime


def run_alone(name: str, command: list[str], seconds: float, log: Path) -> float:
    """Runs `command` in its own process group; returns how many cores other programs used during the run.

    Raises PeerError with the end of its log if it fails or does not end.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # on two cores faster than the default for both peers
    started_s, foreign_s = time.monotonic(), foreign_cpu_s()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            while (code := process.poll()) is None and time.monotonic() - started_s < seconds + START_ALLOWANCE_S:
                try:
                    process.wait(10.0)
                except subprocess.TimeoutExpired:
                    print(f"  {name}: {time.monotonic() - started_s:.0f} s of about {seconds:.0f} s", flush=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        how = f"did not end within {seconds + START_ALLOWANCE_S:.0f} s" if code is None else f"left with code {code}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise PeerError(f"{name}: `{' '.join(command)}` {how}. The end of its output:\n{tail}")
    return (foreign_cpu_s() - foreign_s) / (time.monotonic() - started_s)


def train_command(peer: Peer, seconds: float, seed: int, folder: Path) -> list[str]:
    """Returns the command that trains `peer` and writes its result to `folder`/summary.json."""
    if peer.home:
        script, *fixed = peer.command
        common = ["--seconds", str(seconds), "--seed", str(seed), "--result", str(folder / "summary.json")]
        return [str(peer.python), str(HERE / script), *fixed, *common]
    command = [str(peer.python.parent / "echelon"), "train", "impala", "CartPole-v1", "--actors", "2"]
    command += ["--envs-per-actor", "32", "--minutes", f"{seconds / 60:.4f}", "--seed", str(seed)]
    return [*command, "--run-dir", str(folder)]


def progress_points(run: Path) -> list[tuple[float, int]]:
    """Returns the recorded seconds and steps of an Echelon run, to compute its speed in the same way as the peers'."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["wall_s"], row["env_steps"]) for row in rows if row["kind"] == "train"]


def measure(peer: Peer, seconds: float, seed: int, score: Score) -> None:
    """Trains `peer` once and adds the result to `score`."""
    with tempfile.TemporaryDirectory(prefix=f"peers-{peer.name}-") as scratch:
        folder = Path(scratch) / "run"
        if peer.home:
            folder.mkdir()
        command = train_command(peer, seconds, seed, folder)
        foreign_cores = run_alone(peer.name, command, seconds, Path(scratch) / "log")
        summary = json.loads((folder / "summary.json").read_text())
        rate = float(summary["env_steps_per_s"]) if peer.home else steady_rate(progress_points(folder))
    mean_return = summary.get("mean_return", summary.get("return_mean"))
    score.rates.append(rate)
    score.returns.append(mean_return)
    score.foreign_cores.append(foreign_cores)
    score.settings = summary.get("settings", {"command": " ".join(command[1:])})
    shown = "unknown" if mean_return is None else f"{mean_return:.4g}"
    print(f"  {peer.name}: {rate:,.0f} steps/s, last mean return {shown} ({summary['status']})", flush=True)
    if foreign_cores > DISTURBED_CORES:
        print(f"  {peer.name}: DISTURBED: other programs used {foreign_cores:.2f} cores", flush=True)


def measure_limit(peer: Peer) -> float:
    """Returns how fast two processes step the task with the peer's packages, without policy and learning."""
    with tempfile.TemporaryDirectory(prefix="peers-limit-") as scratch:
        result = Path(scratch) / "limit.json"
        command = [str(peer.python), str(HERE / "limit_cartpole.py"), "--seconds", "5", "--result", str(result)]
        run_alone(f"{peer.name} limit", command, 5.0, Path(scratch) / "log")
        return float(json.loads(result.read_text())["env_steps_per_s"])


def table(scores: dict[str, Score]) -> str:
    """Returns the comparison as text; the ratio is how many times faster Echelon is than the row."""
    own = scores.get("echelon")
    lines = [f"{'':16}{'steps/s':>10}{'lowest':>10}{'highest':>10}{'echelon is':>12}{'limit':>10}{'of limit':>10}"]
    lines[0] += f"{'disturbed':>11}"
    for name, score in scores.items():
        rate = median(score.rates)
        ratio = f"{median(own.rates) / rate:.2f} x" if own else "-"
        disturbed = sum(cores > DISTURBED_CORES for cores in score.foreign_cores)
        line = f"{name:16}{rate:>10,.0f}{min(score.rates):>10,.0f}{max(score.rates):>10,.0f}{ratio:>12}"
        lines.append(line + f"{score.limit:>10,.0f}{rate / score.limit:>10.1%}{disturbed:>11}")
    return "\n".join(lines)


def report(scores: dict[str, Score], seconds: float, load: float) -> dict[str, Any]:
    """Returns the content of the JSON file."""
    rows = {
        name: {
            "env_steps_per_s": median(score.rates),
            "rounds": score.rates,
            "last_mean_returns": score.returns,
            "foreign_cores": score.foreign_cores,
            "limit_steps_per_s": score.limit,
            "share_of_limit": median(score.rates) / score.limit,
            "settings": score.settings,
        }
        for name, score in scores.items()
    }
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "load_at_start": load}
    return {"task": "CartPole-v1", "seconds_per_round": seconds, "machine": machine, "peers": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds; an even number balances the order (default 4)")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of each peer in a round")
    parser.add_argument("--only", nargs="+", choices=[peer.name for peer in PEERS], help="run only these")
    parser.add_argument("--out", type=Path, default=HERE / "peers.json", help="the JSON file")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds < 10:
        parser.error(f"--rounds={options.rounds} must be at least 1 and --seconds={options.seconds} at least 10.")
    peers = [peer for peer in PEERS if not options.only or peer.name in options.only]
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load of this machine is {load:.1f}; other programs affect the comparison.")
    scores = {peer.name: Score() for peer in peers}
    try:
        for peer in peers:
            install(peer)
        limits = {home: measure_limit(peer) for home, peer in {peer.home: peer for peer in peers}.items()}
        for peer in peers:
            scores[peer.name].limit = limits[peer.home]
        for number in range(options.rounds):
            for peer in peers if number % 2 == 0 else reversed(peers):
                print(f"round {number + 1} of {options.rounds}: {peer.name}", flush=True)
                measure(peer, options.seconds, seed=number, score=scores[peer.name])
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(report(scores, options.seconds, load), indent=2) + "\n")
    print(f"\n{table(scores)}\n\nwritten to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
