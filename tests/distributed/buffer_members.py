"""Scenarios of the buffer tests, which the members of a world run; each returns its findings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from server_members import error_of, wait_until

from echelon.servers import DistributedBuffer, DistributedEpisodeBuffer, DistributedPrioritizedBuffer
from echelon.world import RpcGroup, World

ALPHA, BETA, EPSILON = 0.6, 0.4, 0.01


def transition(number: int, **more: Any) -> dict[str, Any]:
    return {
        "state": {"state": torch.full((1, 4), float(number))},
        "action": {"action": torch.tensor([[number % 2]])},
        "next_state": {"state": torch.full((1, 4), number + 1.0)},
        "reward": float(number),
        "terminal": False,
        **more,
    }


def is_whole(state: torch.Tensor, next_state: torch.Tensor, reward: torch.Tensor) -> bool:
    return bool((state == reward).all()) and bool((next_state == reward + 1.0).all())


def uniform(world: World, num: int) -> dict[str, Any]:
    """Members 0 and 1 hold 30 and 70 items, 2 none; all draw."""
    group = world.create_rpc_group("uniform", world.members)
    buffer = DistributedBuffer("b", group, 70, seed=world.rank)
    group.barrier()
    found: dict[str, Any] = {"empty": buffer.sample_batch(5), "nothing": buffer.all_size()}
    group.barrier()
    for number in range((30, 75, 0)[world.rank]):  # 5 more than fit: the oldest are evicted
        buffer.append(transition(100 * world.rank + number))
    group.barrier()
    found["sizes"] = (buffer.size(), buffer.all_size())
    counts: dict[int, int] = {}
    for _ in range(num):
        size, batch = buffer.sample_batch(20, sample_attrs=("state", "next_state", "reward"))
        assert batch is not None and size == 20
        state, next_state, reward = batch
        assert is_whole(state["state"], next_state["state"], reward) and len(set(reward.flatten().tolist())) == 20
        for number in reward.flatten().int().tolist():
            counts[number] = counts.get(number, 0) + 1
    found["counts"] = counts
    found["lengths"] = [
        buffer.sample_batch(*arguments)[0]
        for arguments in ((500,), (500, True, None, "random"), (1, True, None, "all"), (0,), (-1,))
    ]
    found["method"] = error_of(lambda: buffer.sample_batch(5, sample_method="best"))
    group.barrier()
    if world.rank == 1:
        buffer.clear()
    group.barrier()
    found["cleared"] = (buffer.size(), buffer.all_size(), buffer.sample_batch(20)[0])
    group.barrier()
    if world.rank == 2:
        buffer.append(transition(0, extra=1.0))
        found["mixed"] = error_of(lambda: buffer.sample_batch(100))
        buffer.all_clear()
    group.barrier()
    found["all cleared"] = (buffer.size(), buffer.all_size(), buffer.sample_batch(20))
    group.barrier()
    return found


def prioritized_buffer(group: RpcGroup, **more: Any) -> DistributedPrioritizedBuffer:
    return DistributedPrioritizedBuffer("p", group, 100, EPSILON, ALPHA, BETA, 0.0, seed=7, **more)


def priority_of(number: int) -> float:
    return 0.1 + number % 10


def weights(world: World, num: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Members hold `sizes` items; member 2 draws, and compares with one buffer that holds all of them."""
    group = world.create_rpc_group(f"weights {sizes}", world.members)
    buffer = prioritized_buffer(group)
    group.barrier()
    assert buffer.sample_batch(5) == (0, None, None, None)
    group.barrier()
    for number in range(sizes[world.rank]):
        buffer.append(transition(100 * world.rank + number), priority_of(number))
    group.barrier()
    masses = {100 * r + n: (priority_of(n) + EPSILON) ** ALPHA for r, size in enumerate(sizes) for n in range(size)}
    total, counts, worst = sum(masses.values()), dict.fromkeys(masses, 0), 0.0
    for _ in range(num if world.rank == 2 else 0):
        size, batch, indexes, got = buffer.sample_batch(50, sample_attrs=("reward",))
        assert batch is not None and indexes is not None and got is not None and size == len(got) == 50
        numbers = batch[0].flatten().int().tolist()
        expected = np.array([(len(masses) * masses[number] / total) ** -BETA for number in numbers])
        worst = max(worst, float(np.abs(got - expected / expected.max()).max()))
        for number in numbers:
            counts[number] += 1
        slots = np.concatenate([index for index, _ in indexes.values()])
        assert [number % 100 for number in numbers] == slots.tolist()
    group.barrier()
    if world.rank == 0:
        for number in range(40, 80):
            buffer.append(transition(number), priority_of(number))
    group.barrier()
    if world.rank == 2:
        worst = max(worst, *after_growth(buffer, masses))
    group.barrier()
    return {"masses": {number: masses[number] for number in counts}, "counts": counts, "worst": worst}


def after_growth(buffer: DistributedPrioritizedBuffer, masses: dict[int, float]) -> list[float]:
    """Returns the error of the weights after member 0 has grown: in the batch split before that, and in the next."""
    old = {member: sum(mass for number, mass in masses.items() if number // 100 == member) for member in range(3)}
    masses |= {number: (priority_of(number) + EPSILON) ** ALPHA for number in range(40, 80)}
    new = {member: sum(mass for number, mass in masses.items() if number // 100 == member) for member in range(3)}
    errors = []
    for split_by in (old, new):
        _, batch, _, got = buffer.sample_batch(100, sample_attrs=("reward",))
        assert batch is not None and got is not None
        numbers = batch[0].flatten().int().tolist()
        shares = {member: mass / sum(split_by.values()) for member, mass in split_by.items()}
        chances = np.array([shares[number // 100] * masses[number] / new[number // 100] for number in numbers])
        expected = (len(masses) * chances) ** -BETA
        errors.append(float(np.abs(got - expected / expected.max()).max()))
    return errors


def stored(world: World) -> dict[str, Any]:
    """Whole episodes of 3, 4 and 5 steps in buffers of transitions; batches of exactly the requested size."""
    group = world.create_rpc_group("stored", world.members)
    plain = DistributedBuffer("plain", group, 70, seed=world.rank)
    judged = prioritized_buffer(group)
    group.barrier()
    start, num = 100 * world.rank, 3 + world.rank
    steps = [transition(start + step) for step in range(num)]
    plain.store_episode(steps)
    judged.store_episode(steps, [float(step) for step in range(num)])
    misfit = [*steps, transition(start + num, extra=1.0)]
    found: dict[str, Any] = {"misfit": [error_of(lambda b=b: b.store_episode(misfit)) for b in (plain, judged)]}
    found["empty"] = [error_of(lambda b=b: b.store_episode([])) for b in (plain, judged)]
    found["priorities"] = error_of(lambda: judged.store_episode(steps, [1.0]))
    group.barrier()
    found["sizes"] = [plain.size(), plain.all_size(), judged.size(), judged.all_size()]
    found["rewards"] = sorted(plain.sample_batch(99, sample_attrs=("reward",))[1][0].flatten().tolist())  # type: ignore[index]
    found["plain"] = [plain.sample_batch(size)[0] for size in (1, 5, 7, 11, 12, 13)]
    found["judged"] = [judged.sample_batch(size).size for size in (1, 5, 7, 11, 12, 13)]
    found["lengths"] = [len(judged.sample_batch(size).weights) for size in (1, 5, 12)]  # type: ignore[arg-type]
    found["mass"] = masses_of(judged)[world.name].total - sum((step + EPSILON) ** ALPHA for step in range(num))
    group.barrier()
    return found


def tainted(world: World) -> dict[str, Any] | None:
    """Between a batch and its new priorities, member 0 overwrites everything it holds, member 1 nothing."""
    group = world.create_rpc_group("tainted", world.members)
    buffer = prioritized_buffer(group)
    group.barrier()
    for number in range((100, 100, 0)[world.rank]):
        buffer.append(transition(number), 0.0)
    group.barrier()
    found: dict[str, Any] = {}
    if world.rank == 2:
        size, _, indexes, _ = buffer.sample_batch(64)
        assert indexes is not None and size == 64
        found["members"] = sorted(indexes)
    group.barrier()
    if world.rank == 0:
        for number in range(100):
            buffer.append(transition(number), 0.0)
    group.barrier()
    if world.rank == 2:
        before = {member: mass.total for member, mass in masses_of(buffer).items()}
        buffer.update_priority(torch.full((64, 1), 50.0), indexes)
        after = {member: mass.total for member, mass in masses_of(buffer).items()}
        drawn = {member: len(set(index.tolist())) for member, (index, _) in indexes.items()}
        found["passed over"], found["drawn"] = buffer.passed_over, {m: len(index) for m, (index, _) in indexes.items()}
        found["grown"] = {member: after[member] - before[member] for member in after}
        found["expected"] = {"0": 0.0, "1": drawn["1"] * ((50.0 + EPSILON) ** ALPHA - EPSILON**ALPHA), "2": 0.0}
        found["too few"] = error_of(lambda: buffer.update_priority(np.ones(3), indexes))
        found["nan"] = error_of(lambda: buffer.update_priority(np.full(64, np.nan), indexes))
        found["stranger"] = error_of(lambda: buffer.update_priority(np.ones(1), {"x": (np.zeros(1), np.zeros(1))}))
        found["unchanged"] = {member: mass.total - after[member] for member, mass in masses_of(buffer).items()}
    group.barrier()
    return found


def counted(buffer: DistributedBuffer | DistributedPrioritizedBuffer, size: int = 64) -> dict[int, int]:
    """Returns the number of a batch's items per member."""
    batch = buffer.sample_batch(size, sample_attrs=("reward",))[1]
    assert batch is not None
    members, counts = np.unique(batch[0].numpy(), return_counts=True)
    return {int(member): int(count) for member, count in zip(members, counts, strict=True)}


def grown(world: World) -> dict[str, Any]:
    """Between batches of member 2, member 1 grows a hundredfold; then member 2 itself, which is empty at first."""
    group = world.create_rpc_group("grown", world.members)
    plain = DistributedBuffer("plain", group, 20_000, seed=0)
    judged = DistributedPrioritizedBuffer("judged", group, 20_000, seed=0)
    late = DistributedBuffer("late", group, 100, seed=0)
    mine = transition(world.rank)
    if world.rank < 2:
        plain.store_episode([mine] * 100)
        judged.store_episode([mine] * 100)
    if world.rank == 1:
        late.store_episode([mine] * 100)
    group.barrier()
    found: dict[str, Any] = {}
    if world.rank == 2:
        found["before"] = counted(plain)
        counted(judged)
        counted(late)
    group.barrier()
    if world.rank == 1:
        plain.store_episode([mine] * 9900)
    if world.rank == 0:
        late.store_episode([mine] * 100)
    group.barrier()
    if world.rank == 2:
        found["after"] = counted(plain)
        plain.store_episode([mine] * 10_100)
        judged.store_episode([mine] * 200)
        found |= {"own, uniform": counted(plain).get(2), "own, by priority": counted(judged).get(2)}
        wait_until(lambda: 0 in counted(late))  # which was empty at the first request of member 2
        found["newcomer"] = True
    group.barrier()
    return found


def rooms(world: World) -> dict[str, Any]:
    """Member 1 has 40 of at most 100 items; member 2, with a capacity of 10, draws all of them and sets priorities."""
    group = world.create_rpc_group("rooms", world.members)
    buffer = DistributedPrioritizedBuffer("p", group, (5, 100, 10)[world.rank], EPSILON, 1.0, seed=0)
    if world.rank == 1:
        for number in range(40):
            buffer.append(transition(number), 1.0)
    group.barrier()
    found: dict[str, Any] = {}
    if world.rank == 2:
        indexes = buffer.sample_batch(40).indexes
        assert indexes is not None
        buffer.update_priority(np.arange(40.0), indexes)
        found["slots"] = sorted(indexes["1"][0].tolist())
        found["grown"], found["expected"] = masses_of(buffer)["1"].total, sum(range(40)) + 40 * EPSILON
    group.barrier()
    return found


def masses_of(buffer: DistributedPrioritizedBuffer) -> dict[str, Any]:
    buffer.all_size()
    return dict(buffer._peers.masses)


def episodes(world: World) -> dict[str, Any]:
    """Members 0 and 1 store episodes of 1 to 5 steps; 2 draws."""
    group = world.create_rpc_group("episodes", world.members)
    buffer = DistributedEpisodeBuffer("e", group, 20, seed=0)
    group.barrier()
    if world.rank < 2:
        for number in range(10):
            start = 1000 * world.rank + 10 * number
            buffer.store_episode([transition(start + step, log_prob=-0.5) for step in range(number % 5 + 1)])
    group.barrier()
    size, drawn = buffer.sample_batch(12)
    assert drawn is not None
    starts = [int(episode["reward"][0]) for episode in drawn]
    for start, episode in zip(starts, drawn, strict=True):
        steps = start // 10 % 10 % 5 + 1
        assert episode["reward"].flatten().tolist() == [float(start + step) for step in range(steps)]
        assert episode["log_prob"].shape == (steps, 1) and episode["state"]["state"].shape == (steps, 4)
    group.barrier()
    return {"size": size, "different": len(set(starts)), "all": buffer.all_size()}


def concurrent(world: World, num: int) -> dict[str, Any]:
    """Members 0 and 1 append continuously while member 2 samples, checks and sets new priorities."""
    group = world.create_rpc_group("concurrent", world.members)
    buffer = DistributedPrioritizedBuffer("p", group, 256, seed=world.rank)
    written: set[str] = set()
    if world.rank == 2:
        group.register("written", written.add)
    group.barrier()
    if world.rank < 2:
        for number in range(num):
            buffer.append(transition(100_000 * world.rank + number))
        group.registered_sync("written", args=(world.name,))
        return {}
    wait_until(lambda: buffer.all_size() >= 64)
    batches, members = 0, set()
    while len(written) < 2 or batches < 50:
        size, batch, indexes, got = buffer.sample_batch(64, sample_attrs=("state", "next_state", "reward"))
        assert batch is not None and indexes is not None and got is not None and size == len(batch[2]) == 64
        assert is_whole(batch[0]["state"], batch[1]["state"], batch[2])
        assert got.max() == 1.0 and got.min() > 0.0
        buffer.update_priority(np.random.rand(64), indexes)
        members |= set(indexes)
        batches += 1
    return {"batches": batches, "members": sorted(members), "all": buffer.all_size(), "lost": buffer.lost}
