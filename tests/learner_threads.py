"""Learners as threads of one process, with real connections between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from echelon.roles.learners import Learners
from echelon.world.process_group import make_process_group

Result = TypeVar("Result")
DEADLINE_S = 120.0  # of what takes a second on an idle machine


def in_threads(functions: list[Callable[[], Result]]) -> list[Result]:
    """Runs the functions concurrently and returns their results; raises the error if one failed."""
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[index] for index in range(len(functions))]


def make_learners(size: int) -> list[Learners]:
    store, names = dist.HashStore(), [f"learner-{rank}" for rank in range(size)]

    def join(rank: int) -> Learners:
        return Learners(names, rank, make_process_group(store, "learners", rank, names, timeout_s=DEADLINE_S))

    return in_threads([lambda rank=rank: join(rank) for rank in range(size)])  # type: ignore[misc]
