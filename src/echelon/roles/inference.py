"""The inference role: an inference server as a process of a run.

Waits for: requests of its actors (its `bell` word on the board). Wakes: the actors to which it replied. If it dies, the
supervisor starts a new one, which finds requests and recurrent states on the board; its actors wait in the meantime.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.envs.make import env_seeds
from echelon.roles.context import Context
from echelon.roles.placement import server_threads
from echelon.roles.plan.parts import Plan
from echelon.roles.plan.placement import server_device
from echelon.roles.serving import Serving
from echelon.servers.inference import InferenceServer, PolicyAnswerer
from echelon.transport.batcher import Batcher, BatchRule

INFERENCE_SEED = 1 << 22  # used as an actor index that no actor has, so servers share no random stream with actors


class Inference(Serving):
    """The inference role: replies to one round of requests per step."""

    KIND = "inference"
    server: InferenceServer

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)  # the initial weights must not depend on the number of threads
        super().__init__(context)
        plan, config = Plan(context), context.train
        # In a shared process no request can arrive while the server waits, and timing would change the rounds.
        wait_us = 0.0 if context.shares_process else config.acting.max_wait_us
        rule = BatchRule(config.acting.batch, config.acting.max_batch, wait_us, config.acting.spin_us)
        server = context.index % config.acting.servers  # on the board of this host
        self.server = self._make_server(context, plan, Batcher(plan.act_board(), server, rule))

    def _make_server(self, context: Context, plan: Plan, batcher: Batcher) -> InferenceServer:
        """Returns a server on the configured device."""
        config, weights = context.train, plan.board()
        correlation = config.algorithm.noise_correlation
        start = (context.generation << 16) + context.incarnation  # unique for every start of this server
        seed = env_seeds(config.seed, INFERENCE_SEED + context.index, start, 1)[0]
        device = server_device(config, plan.model.parameters.numel(), context.index)
        if device == "cpu":
            if not context.shares_process:  # otherwise the setting would apply to the other roles, too
                torch.set_num_threads(server_threads(config, plan.model))
            answerer = PolicyAnswerer(
                plan.model, batcher.board, weights, seed, with_value=config.acting.value, noise_correlation=correlation
            )
            return InferenceServer(batcher, answerer, plan.act_listener(batcher, self.report))
        from echelon.servers.cuda import CudaAnswerer, CudaServer  # imported late: most runs do not need it

        def report(text: str) -> None:
            self.station.report("message", f"{context.name}: {text}")

        if not context.shares_process:  # streams, graphs and page-locked memory use the current device
            torch.cuda.set_device(device)
        model = Plan(context, device=device).model
        answerer_on_gpu = CudaAnswerer(
            model,
            batcher.board,
            weights,
            seed,
            groups=batcher.groups,
            report=report,
            with_value=config.acting.value,
            noise_correlation=correlation,
        )
        return CudaServer(batcher, answerer_on_gpu, plan.act_listener(batcher, self.report))

    def times(self) -> dict[str, float]:
        server = self.server
        return {"act": server.forward_s, "wait": server.wait_s, "transfer": server.transfer_s}

    def figures(self) -> dict[str, Any]:
        """Returns the number and mean size of rounds, missed deadlines and refused frames."""
        server = self.server
        return {
            "rounds": server.num_rounds,
            "mean_rows": server.num_rows / max(server.num_rounds, 1),
            "missed": server.batcher.num_missed,
            "refused": server.listener.num_refused if server.listener is not None else 0,
        }


def inference(config: dict[str, Any]) -> Inference:
    """The entry point of an inference process."""
    return Inference(Context.from_config(config))
