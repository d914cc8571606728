"""Checkpoints: trees round-trip exactly, writes are atomic, damage is found and named."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import save_checkpoint
from echelon.errors import ConfigError
from echelon.runs import checkpoint
from echelon.runs.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    newest_intact,
    save_weights,
    weights_sha256,
)
from echelon.runs.packing import Packed, pack, unpack
from running import TESTS


def same(left: Any, right: Any) -> bool:
    """Equal in type, structure, order and bits."""
    if type(left) is not type(right):
        return False
    match left:
        case torch.Tensor():
            return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        case np.ndarray():
            return left.dtype == right.dtype and np.array_equal(left, right)
        case dict():
            return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
        case list() | tuple():
            return len(left) == len(right) and all(map(same, left, right))
        case float():
            return repr(left) == repr(right)
    return bool(left == right)


def through_json(tree: Any) -> Any:
    packed = pack(tree)
    return unpack(Packed(json.loads(json.dumps(packed.structure, allow_nan=False)), packed.tensors))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.sampled_from(["$tuple", "$tensor", "$float"])
arrays = st.sampled_from(
    [torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), np.arange(4.0).reshape(2, 2), np.float32(0.1), np.True_]
)
trees = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@given(trees)
def test_any_tree_survives(tree: Any) -> None:
    assert same(through_json(tree), tree)


def test_dotted_keys_that_make_the_same_name_stay_apart() -> None:
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: {"x": torch.full((1,), 2.0)}, "1.x": torch.ones(2)}
    assert same(through_json(tree), tree)


def test_random_generators_continue_where_they_were() -> None:
    generator, python = np.random.default_rng(7), random.Random(7)
    states = {"numpy": generator.bit_generator.state, "python": python.getstate(), "torch": torch.get_rng_state()}
    saved = through_json(states)
    expected = (generator.random(3).tolist(), python.random(), torch.rand(3))
    generator.bit_generator.state = saved["numpy"]
    python.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    assert same((generator.random(3).tolist(), python.random(), torch.rand(3)), expected)


def test_pack_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(TypeError, match=r"state\.a\.0 is builtins\.set"):
        pack({"a": [{1}]})


def test_pack_copies() -> None:
    weight = torch.zeros(2)
    packed = pack({"weight": weight})
    weight += 1
    assert torch.equal(unpack(packed)["weight"], torch.zeros(2))


def test_training_goes_on_identically_from_a_checkpoint(tmp_path: Path) -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = save_checkpoint(tmp_path, state, step=12345, keep=1)
    assert path.name == "step_000000012345"
    step(model, optimizer)

    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    other_optimizer = torch.optim.Adam(other.parameters(), lr=1.0)
    loaded = load_checkpoint(path)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    step(other, other_optimizer)
    assert weights_sha256(other.state_dict()) == weights_sha256(model.state_dict())


def test_only_the_newest_are_kept_and_an_abandoned_future_goes(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, {"step": step}, step=step, keep=2)
    assert [load_checkpoint(path)["step"] for path in sorted(tmp_path.iterdir())] == [30, 40]
    save_checkpoint(tmp_path, {"step": 35}, step=35, keep=2)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and load_checkpoint(latest) == {"step": 35}
    assert [load_checkpoint(path)["step"] for path in sorted(tmp_path.iterdir())] == [30, 35]


def test_a_reader_takes_a_checkpoint_that_is_being_removed_for_no_damage(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"x": torch.ones(1000)}, step=0, keep=1)

    def write() -> None:
        for step in range(1, 100):
            save_checkpoint(tmp_path, {"x": torch.ones(1000)}, step=step, keep=1)

    (writer := threading.Thread(target=write)).start()
    while writer.is_alive():
        newest = newest_intact(tmp_path)
        assert newest is not None and newest[1] == ""
    writer.join()
    assert newest_intact(tmp_path) == (tmp_path / "step_000000000099", "")


def test_the_same_step_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"try": 1}, step=5, keep=3)
    path = save_checkpoint(tmp_path, {"try": 2}, step=5, keep=3)
    assert load_checkpoint(path) == {"try": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        save_checkpoint(tmp_path, {}, step=1, keep=0)


def no_space(*names: object) -> None:
    raise OSError(28, "No space left on device")


def test_killed_between_two_renames_leaves_what_was_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path, {"x": 1}, step=7, keep=1)
    child = os.fork()
    if child == 0:
        renames, rename = itertools.count(), os.rename
        os.rename = lambda *names: rename(*names) if next(renames) == 0 else os._exit(9)
        checkpoint._put(tmp_path, checkpoint._Content.of({"x": 2}), 7, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and not path.exists()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", no_space)
        assert newest_intact(tmp_path) is None, "but nothing is removed"
    assert newest_intact(tmp_path) == (path, "") and load_checkpoint(path) == {"x": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save_checkpoint(tmp_path, {"x": torch.ones(2)}, step=1, keep=1)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="No space"):
            save_checkpoint(tmp_path, {"x": torch.zeros(2)}, step=2, keep=1)
    assert list(tmp_path.iterdir()) == [old]
    assert torch.equal(load_checkpoint(old)["x"], torch.ones(2))


def test_a_reader_leaves_what_is_being_written_alone(tmp_path: Path) -> None:
    """Also one in another container, which cannot see the process of the writer; when that is killed, it clears up."""
    code = "import sys; from pathlib import Path; from echelon.runs.checkpoint import latest_checkpoint as latest; "
    code += "assert latest(Path(sys.argv[1])) is None"
    elsewhere = ["unshare", "-rpf", "--mount-proc"]
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("process numbers of its own cannot be had here")
    inlet, outlet = os.pipe()
    writer = os.fork()
    if writer == 0:
        checkpoint.put_folder = lambda *folders: os.write(outlet, b"written") and threading.Event().wait()
        save_checkpoint(tmp_path, {"x": 1}, step=7, keep=1)
        os._exit(1)
    try:
        assert os.read(inlet, 7) == b"written"
        assert latest_checkpoint(tmp_path) is None and len(list(tmp_path.iterdir())) == 1
        environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
        subprocess.run([*elsewhere, sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        os.close(inlet)
        os.close(outlet)
    assert latest_checkpoint(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_temporary_folders_of_the_dead_are_cleaned_and_of_other_hosts_when_they_are_old(tmp_path: Path) -> None:
    dead, foreign, foreign_old = (
        tmp_path / f".tmp-{host}.new" for host in (socket.gethostname(), "else-where", "else.where")
    )
    for folder in (dead, foreign, foreign_old):
        folder.mkdir()
    os.utime(foreign_old, (0, 0))
    assert latest_checkpoint(tmp_path) is None
    assert list(tmp_path.iterdir()) == [foreign]
    dead.mkdir()  # it is no obstacle
    saved = save_checkpoint(tmp_path, {}, step=1, keep=1)
    assert sorted(tmp_path.iterdir()) == sorted([foreign, saved])


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    assert newest_intact(tmp_path / "none") is None


def flip_tensor_byte(path: Path) -> None:
    data = bytearray((path / checkpoint.TENSORS).read_bytes())
    data[-1] ^= 1
    (path / checkpoint.TENSORS).write_bytes(data)


def cut_tensors(path: Path) -> None:
    data = (path / checkpoint.TENSORS).read_bytes()
    (path / checkpoint.TENSORS).write_bytes(data[: len(data) // 2])


def remove_tensors(path: Path) -> None:
    (path / checkpoint.TENSORS).unlink()


def cut_state(path: Path) -> None:
    (path / checkpoint.STATE).write_text((path / checkpoint.STATE).read_text()[:-20])


def change_state(path: Path) -> None:
    text = (path / checkpoint.STATE).read_text()
    (path / checkpoint.STATE).write_text(text.replace("12.5", "13.5"))


def remove_state(path: Path) -> None:
    (path / checkpoint.STATE).unlink()


def empty_state(path: Path) -> None:
    (path / checkpoint.STATE).write_text("[]")


DAMAGES = [
    (flip_tensor_byte, "tensors.safetensors is damaged: its SHA-256"),
    (cut_tensors, "tensors.safetensors is damaged: its SHA-256"),
    (remove_tensors, "tensors.safetensors is damaged: it cannot be read"),
    (cut_state, "state.json is damaged: it cannot be read"),
    (change_state, "state.json is damaged: the SHA-256 of its structure"),
    (remove_state, "state.json is damaged: it cannot be read"),
    (empty_state, "state.json is damaged: it has no structure"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damage_is_found_and_the_previous_one_named(tmp_path: Path, damage: Any, message: str) -> None:
    tree = {"weight": torch.arange(4.0), "rate": 12.5}
    first = save_checkpoint(tmp_path, tree, step=1, keep=2)
    second = save_checkpoint(tmp_path, tree, step=2, keep=2)
    assert newest_intact(tmp_path) == (second, "")
    damage(second)
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(second)
    assert message in str(caught.value)
    assert f"Use the previous checkpoint {first}" in str(caught.value)
    intact = newest_intact(tmp_path)
    assert intact is not None and intact[0] == first
    assert message in intact[1]
    damage(first)
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is intact"):
        newest_intact(tmp_path)
    with pytest.raises(ConfigError, match="start a new run"):
        load_checkpoint(first)


def test_another_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {}, step=1, keep=1)
    state = json.loads((path / checkpoint.STATE).read_text())
    (path / checkpoint.STATE).write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(ConfigError, match="has format 99; this Echelon reads format 1"):
        load_checkpoint(path)


def test_weights_hash_is_canonical() -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.tensor(True)
    reference = weights_sha256({"a": a, "b": b})
    assert weights_sha256({"b": b, "a": a.T.contiguous().T}) == reference
    changed = [
        {"a": a.reshape(3, 2), "b": b},
        {"a": a.to(torch.float64), "b": b},
        {"a": a + 1, "b": b},
        {"a": a, "c": b},
        {"a": a},
    ]
    assert reference not in {weights_sha256(tensors) for tensors in changed}


def test_weights_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "weights.safetensors"
    tied = torch.randn(3, 2)
    tensors = {"a": tied, "b": tied, "c": tied.T, "empty": torch.zeros(0)}
    save_weights(path, tensors, {"version": "7"})
    assert weights_sha256(load_weights(path)) == weights_sha256(tensors)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"version": "7"}
    assert list(path.parent.iterdir()) == [path]


def test_weights_file_damage(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(path)
    path.write_bytes(b"\x80\x04not a safetensors file at all")
    with pytest.raises(ConfigError, match=r"weights\.safetensors cannot be read"):
        load_weights(path)
