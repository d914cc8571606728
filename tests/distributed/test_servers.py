"""Servers and buffers among real processes."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import served_worlds as worlds

from echelon.world import launch

Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found_by() -> Found:
    """Returns the findings of the members in each scenario, in rank order."""
    everything = launch(worlds.everything, 3)
    return {scenario: [one[scenario] for one in everything] for scenario in everything[0]}


def test_of_two_pushes_from_one_version_the_second_is_refused(found_by: Found) -> None:
    found = found_by["ordered"]
    assert [one["before"] for one in found] == [None] * 3
    assert [one["pushed"] for one in found] == [True, False, False]
    assert [one["first"] for one in found] == [[True, True]] * 3
    for one in found:
        assert one["pulled"] == (0.0, 1) and one["old"] is None  # a copy
        newest = (2, "v2")
        assert one["versions"] == [[None, (1, "v1"), newest, newest], [None, None, newest, newest]]
        assert one["newer"] == (1, None) and one["again"] is False
        assert "'plain/push' is already registered in the group 'ordered'" in one["taken"]


def test_a_shared_model_is_pushed_and_pulled_by_version(found_by: Found) -> None:
    found = found_by["shared model"]
    assert [one["nothing"] for one in found] == [False] * 3
    assert found[1]["pushed"] is True and found[2]["pushed"] is True
    assert found[2]["conflict"] == (False, [1.0], 1)
    assert found[1]["refused"] == (False, [7.0], 2)  # it keeps its weights and takes over only the version,
    assert found[1]["pushed again"] == [True, True]  # so it is not rejected forever
    for one in found:
        assert one["pulled"] == (True, [2.0], 2, False)
        assert one["not newer"] == (True, [11.0])
        assert "0.weight has the shape [4, 2] here and [3, 2] at the server" in one["misfit"]
        assert one["at last"] == (True, [7.0], 4)
        assert "group 'model_server' already" in one["twice"]


def test_servers_can_be_made_by_hand_and_drop_nothing_silently(found_by: Found) -> None:
    found = found_by["by hand"]
    assert "call manage_model() before start()" in found[0]["early"]
    assert "'1' is not the primary reducer; '0' is" in found[1]["managed"]
    assert "started already" in found[1]["again"]
    assert found[2]["dropped"] == 6
    assert {name: found[2]["stats"][name] for name in ("pushed", "reduced", "queued", "dropped")} == {
        "pushed": 10,
        "reduced": 0,
        "queued": 4,
        "dropped": 6,
    }
    assert "parameter 0.weight has the shape [5, 2] here and [3, 2] in the managed model" in found[2]["misfit"]
    assert "parameter 0.weight has no gradient to push" in found[2]["no gradient"]
    for one in found:
        assert one["pulled"] is True and one["after"] == (True, [-30.0], 2)


@pytest.mark.parametrize(("method", "first", "second"), [("sum", -48.0, -28.0), ("mean", -3.0, -1.75)])
def test_every_gradient_of_every_member_counts(found_by: Found, method: str, first: float, second: float) -> None:
    """48 gradients of 1, 2 and 3 are 12 batches and 3 steps; the second model's rate is 1, 0.5 and 0.25."""
    for one in found_by[method]:
        assert one["at first"] == one["pulled"] == [True, True]
        assert one["values"] == [[first], [second]] and one["versions"] == [4, 4]
        assert one["reduced"] == {"0": 16, "1": 16, "2": 16} and one["dropped"] == 0


def test_what_comes_faster_than_the_optimizer_steps_is_dropped_and_counted(found_by: Found) -> None:
    """300 gradients are in the steps, queued, or counted as dropped."""
    for one in found_by["flooded"]:
        stats, primary = one["stats"], one["stats"]["0"]
        assert [(of["pushed"], of["reduced"], of["dropped"], of["batch"]) for of in stats.values()] == [
            (100, 100, 0, 2)
        ] * 3
        assert primary["primary_pushed"] == 150 and primary["primary_queued"] <= 1
        assert one["dropped"] == 2 * primary["primary_dropped"] >= 2 * (150 - 2 - 4 - 2)
        assert 4 * primary["steps"] + 2 * primary["primary_queued"] + one["dropped"] == 300
        assert one["values"] == [-4.0 * primary["steps"]]


def test_who_pushes_waits_for_a_primary_reducer_that_does_not_answer(found_by: Found) -> None:
    for one in found_by["held up"]:
        assert {name: one[name] for name in ("pushed", "reduced", "queued", "dropped", "undelivered")} == {
            "pushed": 100,
            "reduced": 100,
            "queued": 0,
            "dropped": 0,
            "undelivered": 0,
        }


def test_a_primary_reducer_that_answers_too_late_is_told_and_loses_nothing(found_by: Found) -> None:
    """Member 1 retries twice; finally everything that it had reduced arrives."""
    found = found_by["late"]
    for raised in found[1]["raised"]:
        assert raised.startswith("TransportTimeout: gradient server late_0: the primary reducer 0 is late; 16 red")
    for one in found:
        member = one["member"]
        assert member["undelivered"] == member["dropped"] == 0
        assert member["pushed"] == member["reduced"] + member["queued"] >= 2 * 17


def test_an_optimizer_that_fails_is_told_to_whoever_pushes(found_by: Found) -> None:
    for raised in found_by["failing"]:
        assert "ReducerFailed" in raised and "ArithmeticError: the optimizer is out of order" in raised
    assert found_by["failing"][0].endswith("reducer of 0 failed with ArithmeticError: the optimizer is out of order")


def chi_square(counts: dict[int, int], shares: dict[int, float]) -> float:
    """Returns the deviation of counts from their shares, in standard deviations of the chi-square distribution."""
    num = sum(counts.values())
    total = sum(shares.values())
    statistic = sum((counts.get(k, 0) - num * s / total) ** 2 / (num * s / total) for k, s in shares.items())
    freedom = len(shares) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_items_of_all_members_are_drawn_uniformly_and_none_twice(found_by: Found) -> None:
    found = found_by["uniform"]
    items = {n: 1.0 for n in [*range(30), *range(105, 175)]}
    for rank, one in enumerate(found):
        assert one["empty"] == (0, None) and one["nothing"] == 0
        assert one["sizes"] == ((30, 70, 0)[rank], 100)
        assert set(one["counts"]) <= set(items) and abs(chi_square(one["counts"], items)) < 5.0
        assert one["lengths"] == [100, 500, 100, 0, 0]
        assert "sample_method='best' is none of" in one["method"]
        assert one["cleared"] == ((30, 0, 0)[rank], 30, 20)
        assert one["all cleared"] == (0, 0, (0, None))
    assert "All members must store the same attributes" in found[2]["mixed"]


@pytest.mark.parametrize("holders", ["two", "three"])
def test_weights_and_frequencies_are_those_of_one_buffer_with_all_items(found_by: Found, holders: str) -> None:
    found = found_by[f"weights of {holders}"][2]
    assert found["worst"] < 1e-9
    assert abs(chi_square(found["counts"], found["masses"])) < 5.0


def test_episodes_are_stored_whole_and_batches_are_of_the_size_asked_for(found_by: Found) -> None:
    for rank, one in enumerate(found_by["stored"]):
        assert all("differs from its first one in the attributes ['extra']" in raised for raised in one["misfit"])
        assert all("episode of 0 transitions" in raised for raised in one["empty"])
        assert "got 1 priorities for an episode of" in one["priorities"]
        assert one["sizes"] == [3 + rank, 12, 3 + rank, 12]
        assert one["rewards"] == [0, 1, 2, 100, 101, 102, 103, 200, 201, 202, 203, 204]
        assert one["plain"] == one["judged"] == [1, 5, 7, 11, 12, 12] and one["lengths"] == [1, 5, 12]
        assert abs(one["mass"]) < 1e-9


def test_a_priority_for_an_item_that_was_overwritten_is_ignored(found_by: Found) -> None:
    found = found_by["tainted"][2]
    assert found["members"] == ["0", "1"]
    for member, expected in found["expected"].items():
        assert found["grown"][member] == pytest.approx(expected, abs=1e-9)
        assert found["unchanged"][member] == 0.0
    assert found["passed over"] == found["drawn"]["0"] > 0
    assert "got 3 priorities for 64 items" in found["too few"]
    assert "priority 0 of 64 is nan" in found["nan"]
    assert "'x' is not one of the members" in found["stranger"]


def test_a_batch_is_split_by_what_the_members_hold_when_they_are_asked(found_by: Found) -> None:
    found = found_by["grown"][2]
    assert found["before"] == {0: 32, 1: 32}
    assert found["after"].get(0, 0) <= 1 and found["after"][1] >= 63  # 100 of 10,100 items are those of 0
    for kind in ("uniform", "by priority"):
        assert found[f"own, {kind}"] == 32, kind  # as many as the others have together
    assert found["newcomer"] is True


def test_members_may_have_room_for_different_numbers_of_items(found_by: Found) -> None:
    found = found_by["rooms"][2]
    assert found["grown"] == pytest.approx(found["expected"], abs=1e-6) and found["slots"] == list(range(40))


def test_episodes_of_all_members_are_drawn_whole(found_by: Found) -> None:
    for one in found_by["episodes"]:
        assert one == {"size": 12, "different": 12, "all": 20}


def test_two_writers_and_a_learner_at_once(found_by: Found) -> None:
    found = found_by["concurrent"][2]
    assert found["members"] == ["0", "1"] and found["all"] == 512 and found["lost"] == {}
    assert found["batches"] >= 50


def test_a_member_that_is_killed_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=worlds.three_of_which_one_dies, args=(str(tmp_path),))
    process.start()
    process.join()
    assert json.loads((tmp_path / "codes.json").read_text()) == [0, -9, 0]
    for rank in (0, 2):
        found: dict[str, Any] = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["sizes"] == [150, 100, 100, 100, 100] and found["rewards"] == [0, 2]
        assert list(found["lost"]) == ["1"]
        assert "member 1 is lost with 50 items" in found["lost"]["1"] and "with 2 members" in found["lost"]["1"]
        assert found["stats"] == ["0", "2"]
        for raised in (found["doomed"], found["again"]):
            assert "PeerLost: gradient server doomed: the primary reducer 1 is lost" in raised
        assert found["undelivered"] >= 1
    found = json.loads((tmp_path / "0.json").read_text())
    for raised in found["abandoned"]:
        assert raised.startswith("PeerLost: gradient server abandoned: none of the reducers ['1'] is alive: ")
        assert "its process" in raised
    assert found["gone"] == 3  # of a batch of 4
    for raised in found["told"]:
        assert "PeerLost" in raised and "gradient server told: the primary reducer 1 is lost" in raised
        assert raised.startswith("PeerLost")
    assert found["passed over"] == found["drawn from the dead"]
