"""`echelon bench act`: actions per second of one inference server, fed by processes on this machine.

Feeders simulate actors whose environments cost nothing: they write prepared observations to the act board, send a
request and wait, one group while the other is served. The server is the one of a training, in this process. The report
also has the rate of the server *alone*: the same rounds, repeated without waiting for feeders, which is its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echelon.bench.harness import Benchmark, Progress, Runs, Setting, columns, machine, option
from echelon.control_groups import num_cores
from echelon.errors import ConfigError

NETWORKS, PRECISIONS = ("mlp", "cnn"), ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class ActSetting(Setting):
    """One measurement: rounds of `batch` rows, from `num_feeders` processes."""

    network: str = option("cnn", "mlp: 2,000 numbers; cnn: 84x84x4 frames", choices=NETWORKS, metavar="{mlp,cnn}")
    batch: int = option(64, "rows per round, a measurement each", default="64,256,1024,4096", metavar="N,N", least=1)
    feeders: int = option(
        0, "feeder processes; 0: half of the cores, as a power of two", shown="", metavar="N", least=0
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N", metavar="DEVICE")
    precision: str = option("float32", "precision on a GPU", choices=PRECISIONS, metavar="{float32,bfloat16}")
    seconds: float = option(5.0, "duration of each measurement", shown="5", metavar="S", above=0)
    max_wait_us: float = option(50_000.0, "how long a round waits for a feeder", shown="50000", metavar="US")
    spin_us: float = option(0.0, "how long a feeder polls before it sleeps", shown="0", metavar="US")
    shm_dir: str = option("/dev/shm", "directory of the shared-memory files", metavar="DIR")

    def check(self) -> None:
        if self.batch % self.num_feeders:
            raise ConfigError(
                f"batch={self.batch} is not a multiple of {self.num_feeders} feeders. Use a multiple, or another "
                "--feeders."
            )

    @property
    def num_feeders(self) -> int:
        """`feeders`, or half of the cores as a power of two: the other half is for the server and its GPU."""
        return self.feeders or 1 << (max(2, num_cores() // 2).bit_length() - 1)


class ActBenchmark(Benchmark[ActSetting, dict[str, Any]]):
    """A sweep over the rows per round."""

    name = "act"
    text = "Feed one inference server with prepared observations from processes, and measure its actions per second."
    setting = ActSetting
    output, output_help = "json", "also write the full report to FILE"
    swept = ("batch",)

    def prepare(self, settings: Sequence[ActSetting]) -> None:
        from echelon.bench.act_server import device_of

        for setting in settings:
            if device_of(setting) == "cpu" and setting.precision != "float32":
                raise ConfigError(
                    f"precision={setting.precision} needs a GPU; the CPU computes in float32. Use --precision float32."
                )

    def measure(self, setting: ActSetting, progress: Progress) -> dict[str, Any]:
        from echelon.bench.act_server import device_of, measure

        feeders, batch = setting.num_feeders, setting.batch
        where = f"{setting.network} on {device_of(setting)}"
        print(f"{where}: rounds of {batch} from {feeders} feeders, {setting.seconds:g} s", flush=True)
        return measure(setting, progress)

    def unit(self, setting: ActSetting) -> str:
        return "seconds"

    def report(self, runs: Runs[ActSetting, dict[str, Any]]) -> dict[str, Any]:
        from echelon.bench.act_server import device_of

        first = runs.sweep.settings[0]
        device = device_of(first)
        return {
            "bench": self.name,
            "network": first.network,
            "batches": [setting.batch for setting in runs.sweep.settings],
            "feeders": first.num_feeders,
            "device": device,
            **{name: getattr(first, name) for name in ("precision", "seconds", "max_wait_us", "spin_us", "shm_dir")},
            **machine(device),
            "results": runs.results,
        }

    def summary(self, runs: Runs[ActSetting, dict[str, Any]]) -> str:
        return table(self.report(runs))


def table(report: dict[str, Any]) -> str:
    """Returns the report as a text table."""
    hardware = report["hardware"]
    where = f"{hardware['cores']} cores{', ' + hardware['gpu'] if hardware['gpu'] else ''}"
    head = f"{report['network']} on {report['device']}, {report['precision']}, {report['feeders']} feeders; {where}"
    rates: list[tuple[str, ...]] = [("batch", "actions/s", "p50 ms", "p95 ms", "mean batch", "alone/s", "overlapped/s")]
    is_gpu = any(result["gpu_ms"] for result in report["results"])
    rounds = ("to GPU", "forward", "from GPU") if is_gpu else ()
    shares: list[tuple[str, ...]] = [("batch", *rounds, "wait", "compute", "settle", "laying", "waiting", "GB/s laid")]
    for result in report["results"]:
        latency, alone, gpu = result["latency_ms"], result["alone"], result["gpu_ms"]
        server, feeders = result["server"], result["feeders"]
        batch, overlapped = str(result["batch"]), alone.get("overlapped_actions_per_s")
        rates.append(
            (
                batch,
                f"{result['actions_per_s']:,.0f}",
                f"{latency['50']:.3f}",
                f"{latency['95']:.3f}",
                f"{result['mean_batch']:.1f}",
                f"{alone['actions_per_s']:,.0f}",
                f"{overlapped:,.0f}" if overlapped else "-",
            )
        )
        times = [f"{gpu[name]:.3f}" if gpu else "-" for name in ("to_gpu", "forward", "from_gpu")] if is_gpu else []
        parts = (server["wait"], server["forward"], server["transfer"], feeders["laying"], feeders["waiting"])
        shares.append((batch, *times, *(f"{part:.0%}" for part in parts), f"{feeders['laid_gb_per_s']:.2f}"))
    on_gpu = "a round on the GPU in ms, and " if is_gpu else ""
    meaning = f"where the time goes: {on_gpu}shares of the server's and the feeders' time"
    return "\n".join(["", head, "", *columns(rates, 13), "", meaning, "", *columns(shares, 10)])
