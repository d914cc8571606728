"""The open episodes of an actor in the run folder, which a resumed run continues.

An actor whose environments have `get_state` and `set_state` saves the state of its teams every
`run.checkpoint_interval_s`, and when it ends, between two steps. A state consists of the environments, the return and
length of each open episode so far, and whether the current observation is the first of its episode. Steps of a
trajectory that is not complete are not learned from, but they are part of the episode: its return and length are those
of the whole episode. Recurrent states are not saved; they start from zeros.

Nobody waits for the file, and nobody but the same actor of a resumed run reads it. If it cannot be written, the
previous one stays. An actor on another host has no run folder and saves nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from echelon import config_io
from echelon.disk import MAX_JSON_BYTES, put_file, read_json
from echelon.roles.context import Context
from echelon.roles.experience import Team
from echelon.runs.folder import OPEN_EPISODES
from echelon.runs.progress import Count

MAX_SHARE = 0.02  # of an actor's time that saving takes, whatever the interval


class SavedTeam(msgspec.Struct, frozen=True):
    """The open episodes of one team, one entry per environment."""

    group: dict[str, Any]  # the state of the environments
    first: list[bool]
    returns: list[float]
    lengths: list[Count]

    @classmethod
    def of(cls, team: Team, group: dict[str, Any]) -> SavedTeam:
        ledger, first = team.ledger, team.first
        if team.page is not None:
            ledger, first = ledger.after(team.page.episodes, team.t), team.page.firsts[team.t]
        return cls(group, first.tolist(), ledger.returns.tolist(), ledger.lengths.tolist())

    def restore(self, team: Team) -> None:
        """Continues the episodes in `team`; raises any exception if they do not fit."""
        sizes = {len(column) for column in (self.first, self.returns, self.lengths)}
        if sizes != {team.group.num_envs}:
            raise ValueError(f"they are of {sorted(sizes)} environments instead of {team.group.num_envs}")
        team.group.set_state(self.group, team.observation)
        if not all(np.isfinite(leaf).all() for leaf in team.observation if leaf.dtype.kind == "f"):
            raise ValueError("an observation is NaN or infinite")
        team.first[:] = self.first
        team.ledger.returns, team.ledger.lengths = np.array(self.returns), np.array(self.lengths, np.int64)


class SavedActor(msgspec.Struct, frozen=True):
    """The content of the file."""

    env: dict[str, Any]  # the configuration of the environments
    teams: list[SavedTeam]


class SavedEpisodes:
    """The file with the open episodes of one actor, whose environments are those of `teams`."""

    def __init__(self, context: Context, teams: Sequence[Team], report: Callable[[str], None]) -> None:
        self.path = context.run_dir / OPEN_EPISODES / f"actor-{context.index}.json"
        self._index, self._train, self._teams, self._report = context.index, context.train, teams, report
        self._interval_s = context.train.run.checkpoint_interval_s
        self.due_at = math.inf  # nothing to save: the run folder is on another host
        if context.is_at_head:
            self.due_at = time.perf_counter() + self._interval_s

    @cached_property
    def _env(self) -> Any:
        """The configuration of the environments as it is read back: with lists in place of tuples."""
        return json.loads(json.dumps(config_io.to_json(self._train)["env"]))

    def save(self) -> None:
        """Replaces the file, unless the environments have no state or it cannot be saved; the latter is reported."""
        if self.due_at == math.inf:
            return
        start, self.due_at = time.perf_counter(), math.inf
        try:
            data = self._data()
        except Exception as error:  # of an environment, which may raise anything; training does not depend on it
            self._cannot_save(f"{type(error).__name__}: {error}")
            return
        if data is None:
            return
        if len(data) > MAX_JSON_BYTES:
            self._cannot_save(f"it has {len(data):,} bytes, more than the {MAX_JSON_BYTES:,} that can be read")
            return
        with contextlib.suppress(OSError):  # the disk is full or read-only, which the learner reports
            self.path.parent.mkdir(exist_ok=True)
            put_file(self.path, data, durable=False)
        end = time.perf_counter()
        self.due_at = end + max(self._interval_s, (end - start) / MAX_SHARE)

    def _data(self) -> bytes | None:
        """Returns the content of the file; None if an environment has no state."""
        teams = []
        for team in self._teams:
            if (group := team.group.get_state()) is None:
                return None
            teams.append(msgspec.structs.asdict(SavedTeam.of(team, group)))
        return json.dumps({"env": self._env, "teams": teams}, allow_nan=False).encode()

    def _cannot_save(self, why: str) -> None:
        self._report(
            f"actor {self._index} cannot save the state of its environments, so a resumed run starts new episodes "
            f"({why:.300}). get_state() must return plain JSON values: numbers, text, lists and dicts."
        )

    def restore(self) -> None:
        """Continues the episodes of the file, if there is one.

        Raises any exception if they do not fit; then all teams must be reset.
        """
        try:
            content = read_json(self.path)
        except FileNotFoundError:
            return
        saved = msgspec.convert(content, SavedActor)
        if saved.env != self._env:
            raise ValueError(f"they are of the environment {saved.env}, the run has {self._env}")
        if len(saved.teams) != len(self._teams):
            raise ValueError(f"they are of {len(saved.teams)} groups of environments instead of {len(self._teams)}")
        for team, one in zip(self._teams, saved.teams, strict=True):
            one.restore(team)
