"""The inference role: an inference server as a process of a run.

Waits for: questions of its actors (its `bell` word on the board). Wakes: those it answered. If it dies, the supervisor
starts another, which finds questions and recurrent states on the board; its actors wait meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.envs.make import env_seeds
from echelon.roles.context import Context
from echelon.roles.placement import pick_device, server_threads
from echelon.roles.plan.parts import Plan
from echelon.roles.serving import Serving
from echelon.servers.inference import InferenceServer, PolicyAnswerer
from echelon.transport.batcher import Batcher, BatchRule

INFERENCE_SEED = 1 << 22  # an actor number that no actor has: what servers draw, nobody else draws


class Inference(Serving):
    """Answers one round a step."""

    KIND = "inference"
    server: InferenceServer

    def __init__(self, context: Context) -> None:
        torch.set_num_threads(1)  # the first weights must not depend on how many drew them
        super().__init__(context)
        plan, config = Plan(context), context.train
        # In a shared process nobody asks while somebody waits, and a clock would decide what is answered together.
        wait_us = 0.0 if context.shares_process else config.acting.max_wait_us
        rule = BatchRule(config.acting.batch, config.acting.max_batch, wait_us, config.acting.spin_us)
        self.server = self._make_server(context, plan, Batcher(plan.act_board(), context.index, rule))

    def _make_server(self, context: Context, plan: Plan, batcher: Batcher) -> InferenceServer:
        """A server on the device that the run asks for."""
        config, weights = context.train, plan.board()
        life = (context.generation << 16) + context.incarnation
        seed = env_seeds(config.seed, INFERENCE_SEED + context.index, life, 1)[0]
        device = pick_device(config.acting.device, plan.model.parameters.numel(), "--acting.device")
        if device == "cpu":
            if not context.shares_process:  # else the other roles compute with these threads, too
                torch.set_num_threads(server_threads(config, plan.model))
            answerer = PolicyAnswerer(plan.model, batcher.board, weights, seed, with_value=config.acting.value)
            return InferenceServer(batcher, answerer, plan.act_listener(batcher))
        from echelon.servers.cuda import CudaAnswerer, CudaServer  # here alone: most runs never need it

        def report(text: str) -> None:
            self.station.report("message", f"{context.name}: {text}")

        model = Plan(context, device=device).model
        answerer_on_gpu = CudaAnswerer(
            model, batcher.board, weights, seed, groups=batcher.groups, report=report, with_value=config.acting.value
        )
        return CudaServer(batcher, answerer_on_gpu, plan.act_listener(batcher))

    def times(self) -> dict[str, float]:
        server = self.server
        return {"act": server.forward_s, "wait": server.wait_s, "transfer": server.transfer_s}

    def figures(self) -> dict[str, Any]:
        """How rounds come out: their number and size, deadlines missed, frames refused."""
        server = self.server
        return {
            "rounds": server.num_rounds,
            "mean_rows": server.num_rows / max(server.num_rounds, 1),
            "missed": server.batcher.num_missed,
            "refused": server.listener.num_refused if server.listener is not None else 0,
        }


def inference(config: dict[str, Any]) -> Inference:
    """The entry of an inference process."""
    return Inference(Context.from_config(config))
