"""One member of a distributed buffer: transitions as users write them, and the batches drawn from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.memory_check import Free
from echelon.replay.episodes import EpisodeBuffer
from echelon.replay.layout import ReplayError
from echelon.servers import DistributedPrioritizedBuffer
from echelon.servers.buffer_episodes import EpisodeList
from echelon.servers.buffer_items import BatchSelection, RowFormat, flatten, flatten_episode, flatten_packed, names_of
from echelon.servers.buffer_member import ALL, PRIORITY, RANDOM, UNIQUE, EpisodeMember, TransitionMember

Array = np.ndarray[Any, Any]


def transition(number: int, **more: Any) -> dict[str, Any]:
    """Returns a transition that can be recognized by its number."""
    return {
        "state": {"state": torch.full((1, 4), float(number))},
        "action": {"action": torch.tensor([[number % 2]])},
        "next_state": {"state": torch.full((1, 4), number + 1.0)},
        "reward": float(number),
        "terminal": number % 5 == 4,
        **more,
    }


def fields_of(*numbers: int, **more: Any) -> dict[str, Array]:
    return flatten_episode([transition(number, **more) for number in numbers])


def rewards_of(answer: dict[str, Any]) -> list[float]:
    """Returns the rewards of a batch that a member drew."""
    rewards: list[float] = RowFormat(answer["form"]).unpack(answer["rows"])["reward"].tolist()
    return rewards


# Transitions and fields.


def test_a_batch_has_the_attributes_in_the_shapes_that_learners_expect() -> None:
    fields = fields_of(3, 4, weight=0.5, feature=torch.ones(1, 2), count=7)
    state, action, next_state, reward, terminal, count, feature, weight = BatchSelection().of(fields)
    assert state["state"].tolist() == [[3.0] * 4, [4.0] * 4] and next_state["state"][0, 0] == 4.0
    assert action["action"].shape == (2, 1) and action["action"].dtype == torch.int64
    assert reward.tolist() == [[3.0], [4.0]] and reward.dtype == torch.float32
    assert terminal.tolist() == [[False], [True]] and terminal.dtype == torch.bool
    assert count == [7, 7] and weight == [0.5, 0.5]  # custom attributes are lists,
    assert [part.tolist() for part in feature] == [[[1.0, 1.0]], [[1.0, 1.0]]]
    concatenated = BatchSelection(("feature", "weight"), concat_attrs=("feature", "weight")).of(
        fields
    )  # unless they are named
    assert concatenated[0].shape == (2, 2) and concatenated[1].tolist() == [[0.5], [0.5]]
    apart = BatchSelection(("state", "reward"), concatenate=False).of(fields)
    assert [part.shape for part in apart[0]["state"]] == [(1, 4), (1, 4)] and apart[1] == [3.0, 4.0]
    reward, rest = BatchSelection(("reward", "*"), concat_attrs=("count",)).of(fields)
    assert rest.keys() == {"count", "feature", "weight"} and rest["count"].tolist() == [[7], [7]]


def test_items_travel_as_rows_of_bytes() -> None:
    fields = fields_of(1, 2, 3, flag=True, feature=torch.ones(1, 2, 3, dtype=torch.float64))
    form = RowFormat.of(fields)
    records = np.empty(3, form.row)
    for name, value in fields.items():
        records[name] = value
    rows = form.pack(records)
    assert rows.dtype == np.uint8 and rows.shape == (3, form.row.itemsize) and np.shares_memory(rows, records)
    back = RowFormat(form.spec).join([rows[:1], rows[1:]])
    assert back.keys() == fields.keys()
    for name, value in back.items():
        assert value.dtype == fields[name].dtype and np.array_equal(value, fields[name]), name


def test_an_episode_may_end_in_either_vocabulary() -> None:
    named = transition(1)
    del named["terminal"]
    modern = flatten({**named, "terminated": np.True_, "truncated": False})
    assert [value.tolist() for value in BatchSelection(("terminal", "terminated", "truncated")).of(modern)] == [
        [[True]],
        [[True]],
        [[False]],
    ]
    assert [value.tolist() for value in BatchSelection(("terminated", "truncated")).of(flatten(transition(4)))] == [
        [[True]],
        [[False]],
    ]


def test_numbers_may_come_as_tensors_and_actions_without_a_second_dimension() -> None:
    given = transition(
        2, action={"action": torch.tensor([1])}, reward=torch.tensor([[2.0]]), log_prob=torch.tensor(-1.0)
    )
    action, reward, log_prob = BatchSelection(("action", "reward", "log_prob")).of(flatten(given))
    assert action["action"].shape == (1,) and reward.tolist() == [[2.0]] and log_prob == [-1.0]
    assert flatten(transition(2, reward=np.float64(0.1)))["reward"].dtype == np.float32
    assert flatten(transition(2, reward=1))["reward"].dtype == np.float32


def test_an_attribute_may_be_none_in_all_transitions() -> None:
    steps = [transition(number, hidden=None, weight=0.5) for number in range(3)]
    packed = {"reward": np.ones(3), "terminal": [False] * 3, "hidden": None, "state": {"state": torch.ones(3, 4)}}
    assert flatten_packed(packed)["hidden/none"].shape == (3, 0)
    member, episodes = TransitionMember("m", 8), EpisodeMember("e", 4, 16)
    member.append(steps)
    member.append(steps[:1])
    episodes.append(steps)
    for answer, num in ((member.draw(0, ALL, 0), 4), (episodes.draw(0, ALL, 0), 3)):
        fields = RowFormat(answer["form"]).unpack(answer["rows"])
        assert names_of(fields)[-2:] == ["hidden", "weight"]
        assert BatchSelection(("hidden", "*"), concat_attrs=("hidden", "weight")).of(fields)[0] == [None] * num
        assert BatchSelection(("reward", "*")).of(fields)[1] == {"hidden": [None] * num, "weight": [0.5] * num}
    with pytest.raises(
        ReplayError, match=r"transition 1 of an episode differs from its first one in the attributes \['hidden'\]"
    ):
        flatten_episode([steps[0], transition(1, hidden=1.0, weight=0.5)])
    with pytest.raises(ReplayError, match="field hidden/none is missing"):
        member.append([transition(1, hidden=1.0, weight=0.5)])
    with pytest.raises(ReplayError, match="reward of a transition is a NoneType"):
        flatten(transition(0, reward=None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"state": {"state": torch.zeros(1)}}, r"lacks \['action', 'next_state', 'reward', 'terminal'\]"),
        (transition(0, state=torch.zeros(1, 4)), "state of a transition is a Tensor; pass a dict of tensors"),
        (transition(0, state={"x": torch.zeros(2, 4)}), r"state\['x'\] of a transition has the shape \(2, 4\)"),
        (transition(0, state={"x": torch.tensor(1.0)}), r"state\['x'\] of a transition has the shape \(\)"),
        (transition(0, state={"x": [1.0]}), r"state\['x'\] of a transition is a list; pass a tensor with a leading"),
        (transition(0, note="text"), "note of a transition is a str; pass a tensor, a number or a boolean"),
        (
            transition(0, half=torch.zeros(1, dtype=torch.bfloat16)),
            "half of a transition is a tensor that numpy cannot",
        ),
        (transition(0, **{"state/x": 1.0}), "attribute 'state/x' of a transition has a slash"),
    ],
)
def test_a_transition_that_does_not_fit_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        flatten(given)


def test_episodes_and_attributes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ReplayError, match="episode of 0 transitions"):
        flatten_episode([])
    with pytest.raises(
        ReplayError, match=r"transition 1 of an episode differs from its first one in the attributes \['extra'\]"
    ):
        flatten_episode([transition(0), transition(1, extra=1.0)])
    with pytest.raises(ReplayError, match="have different shapes"):
        flatten_episode([transition(0), transition(1, state={"state": torch.zeros(1, 3)})])
    with pytest.raises(ReplayError, match=r"no attribute 'rewards'; they have \['state', 'action', 'next_state', "):
        BatchSelection(("rewards",)).of(fields_of(0))


# A member's transitions.


def filled(num: int, capacity: int = 16, alpha: float = 0.0, first: int = 0) -> TransitionMember:
    member = TransitionMember("buffer b of m", capacity, alpha)
    for number in range(first, first + num):
        member.append([transition(number)], None if alpha == 0.0 else [float(number + 1)])
    return member


@settings(deadline=None, max_examples=40)
@given(num=st.integers(1, 40), capacity=st.integers(1, 20), count=st.integers(0, 30), seed=st.integers(0, 1000))
def test_what_is_drawn_is_there_and_drawn_once_if_asked(num: int, capacity: int, count: int, seed: int) -> None:
    member = filled(num, capacity)
    kept = list(range(max(0, num - capacity), num))
    everything = member.draw(0, ALL, seed)
    assert rewards_of(everything) == kept and everything["mass"] == (float(len(kept)), len(kept))
    unique = rewards_of(member.draw(count, UNIQUE, seed))
    assert len(set(unique)) == len(unique) == min(count, len(kept)) and set(unique) <= set(kept)
    drawn = member.draw(count, RANDOM, seed)
    assert len(drawn["number"]) == count and set(rewards_of(drawn)) <= set(kept)
    again = member.draw(count, RANDOM, seed)
    assert again["number"].tolist() == drawn["number"].tolist()  # a seed repeats a batch


def test_a_priority_for_an_overwritten_slot_is_ignored() -> None:
    member = filled(4, capacity=4, alpha=1.0)  # priorities 1, 2, 3, 4 in the slots 0 to 3, all of version 0
    slots, versions = np.arange(4), np.zeros(4, np.int64)
    member.append([transition(4)], [5.0])  # overwrites slot 0: version 1
    before = member.look()["mass"]
    assert before == (2.0 + 3.0 + 4.0 + 5.0, 4)
    assert member.update(slots[:1], versions[:1], np.array([1000.0]))["mass"] == before
    answer = member.update(slots, versions, np.array([1000.0, 6.0, 7.0, 8.0]))
    assert answer["passed_over"] == 1 and answer["mass"] == (6.0 + 7.0 + 8.0 + 5.0, 4)
    answer = member.update(np.array([0]), np.array([1]), np.array([1.5]))
    assert answer["passed_over"] == 0 and answer["mass"] == (6.0 + 7.0 + 8.0 + 1.5, 4)


def test_numbers_are_not_given_again_after_clearing() -> None:
    member = filled(3, capacity=4, alpha=1.0)
    assert member.clear()["mass"] == (0.0, 0) and "number" not in member.draw(3, PRIORITY, 0)
    member.append([transition(9)], [2.0])
    assert member.look()["mass"] == (2.0, 1)
    assert member.update(np.arange(3), np.zeros(3, np.int64), np.full(3, 50.0))["passed_over"] == 3
    drawn = member.draw(4, PRIORITY, 0)  # more than there are: the only item, repeatedly
    assert rewards_of(drawn) == [9.0] * 4 and drawn["number"].tolist() == [3] * 4
    assert TransitionMember("never filled", 4).clear()["mass"] == (0.0, 0)


def test_new_transitions_get_the_highest_priority_so_far() -> None:
    member = TransitionMember("m", 16, alpha=1.0)
    member.append([transition(0)])
    assert member.look()["mass"] == (1.0, 1)
    member.append([transition(1)], [3.0])
    member.append([transition(2)])
    assert member.look()["mass"] == (7.0, 3)
    member.update(np.array([0]), np.array([0]), np.array([10.0]))
    member.append([transition(3)])
    assert member.look()["mass"] == (26.0, 4)


def test_neither_a_priority_that_is_passed_over_nor_one_that_was_cleared_is_the_highest() -> None:
    member = TransitionMember("m", 2, alpha=1.0)
    for number in range(3):
        member.append([transition(number)], [2.0])
    assert member.update(np.array([0, 1]), np.array([0, 0]), np.array([1000.0, 5.0]))["passed_over"] == 1
    member.append([transition(3)])  # replaces the item with priority 5
    assert member.look()["mass"] == (2.0 + 5.0, 2)
    member.clear()
    member.append([transition(4)])
    assert member.look()["mass"] == (1.0, 1)


def test_what_has_no_room_is_refused_by_the_names_that_users_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.replay.shard.free_memory", lambda: Free(100_000, "of memory", "or buy some."))
    with pytest.raises(
        ConfigError, match=r"buffer b of m of 9000 items needs .* Lower buffer_size=9000 \(replay_size of"
    ):
        TransitionMember("buffer b of m", 9000).append([transition(0)])
    with pytest.raises(
        ConfigError, match=r"buffer e of m of 5 items needs .* Lower num_steps=5000 or buffer_size=5 \("
    ):
        EpisodeMember("buffer e of m", 5, 5000).append([transition(0)])


def test_an_epsilon_of_0_is_refused_as_items_could_get_out_of_reach() -> None:
    nobody: Any = SimpleNamespace(get_cur_name=lambda: "0")
    with pytest.raises(ConfigError, match=r"buffer b: .*epsilon=0.0 must be above 0"):
        DistributedPrioritizedBuffer("b", nobody, epsilon=0.0)


def test_a_member_refuses_what_does_not_fit_and_stays_as_it_was() -> None:
    member = filled(3, alpha=1.0)
    mass = member.look()["mass"]
    with pytest.raises(ReplayError, match=r"buffer b of m: field state/state is \(1, 5\)"):
        member.append([transition(0, state={"state": torch.zeros(1, 5)})])
    with pytest.raises(ReplayError, match=r"buffer b of m: it has no field \['extra'\]"):
        member.append([transition(0, extra=1.0)])
    with pytest.raises(ReplayError, match="priority 0 of 1 is nan"):
        member.append([transition(0)], [float("nan")])
    with pytest.raises(ReplayError, match="slots outside 0 to 15"):
        member.update(np.array([16]), np.array([0]), np.array([1.0]))
    with pytest.raises(ReplayError, match="a key is outside"):
        member.update(np.array([3]), np.array([0]), np.array([1.0]))
    with pytest.raises(ReplayError, match="never had any items"):
        TransitionMember("empty", 4, 1.0).update(np.array([0]), np.array([0]), np.array([1.0]))
    with pytest.raises(ReplayError, match="transition 1 of an episode differs"):
        member.append([transition(0), transition(1, extra=1.0)])
    with pytest.raises(ReplayError, match="episode of 0 transitions"):
        member.append([])
    assert member.look()["mass"] == mass


def test_of_more_transitions_than_fit_the_last_are_kept() -> None:
    member = TransitionMember("m", 4, alpha=1.0)
    member.append([transition(number) for number in range(6)], [float(number) for number in range(6)])
    assert member.look()["mass"] == (2.0 + 3.0 + 4.0 + 5.0, 4)
    assert sorted(rewards_of(member.draw(0, ALL, 0))) == [2.0, 3.0, 4.0, 5.0]


# A member's episodes.


def test_episodes_are_drawn_whole_and_none_twice() -> None:
    member = EpisodeMember("buffer b of m", 3, 100)
    assert "number" not in member.draw(2, UNIQUE, 0) and member.look()["mass"] == (0.0, 0)
    starts = [0, 10, 20, 30]
    for start in starts:
        member.append([transition(number) for number in range(start, start + start // 10 + 1)])
    drawn = member.draw(5, UNIQUE, 3)
    assert sorted(drawn["number"].tolist()) == [1, 2, 3] and drawn["mass"] == (3.0, 3)
    ends = np.cumsum(drawn["length"])
    for number, length, end in zip(drawn["number"].tolist(), drawn["length"].tolist(), ends.tolist(), strict=True):
        expected = [10.0 * number + step for step in range(number + 1)]
        assert rewards_of(drawn)[end - length : end] == expected
    assert member.clear()["mass"] == (0.0, 0) and "number" not in member.draw(1, RANDOM, 0)
    member.append([transition(7)])
    assert rewards_of(member.draw(1, ALL, 0)) == [7.0]


def test_an_episode_in_one_piece_is_the_same_as_its_transitions() -> None:
    steps = [transition(number, action_log_prob=-0.5) for number in range(3)]
    packed = {
        name: {"state" if name != "action" else name: torch.cat([next(iter(step[name].values())) for step in steps])}
        for name in ("state", "action", "next_state")
    }
    packed |= {name: torch.tensor([step[name] for step in steps]) for name in ("reward", "terminal", "action_log_prob")}
    one, other = flatten_packed(packed), flatten_episode(steps)
    assert one.keys() == other.keys() and names_of(one)[-1] == "action_log_prob"
    for name, value in one.items():
        assert value.dtype == other[name].dtype and np.array_equal(value, other[name]), name


def test_a_batch_of_episodes_is_a_sequence_of_them() -> None:
    episodes = EpisodeList(np.array([0, 2, 3]), {"state": {"x": torch.arange(3)}, "reward": torch.arange(3.0)})
    assert len(episodes) == 2 and [episode["reward"].tolist() for episode in episodes] == [[0.0, 1.0], [2.0]]
    assert episodes[-1]["state"]["x"].tolist() == [2]
    with pytest.raises(IndexError):
        episodes[2]


def test_episodes_that_are_gone_cannot_be_read() -> None:
    buffer = EpisodeBuffer(10, 2)
    for number in range(3):
        buffer.append({"reward": [float(number)]})
    assert buffer.window() == (1, 3)
    assert buffer.read(np.array([2, 1]))[0]["reward"].tolist() == [2.0]
    with pytest.raises(ReplayError, match="holds episodes 1 to 2"):
        buffer.read(np.array([0]))
