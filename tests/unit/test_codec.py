"""The codec preserves every value that it supports, names the others, and raises only Refused on hostile bytes."""

from __future__ import annotations

import enum
import math
import random
import subprocess
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError, Refused
from echelon.transport.codec import Limits, decode, encode
from echelon.transport.extensions import ARRAY, ARRAY_DTYPES, BYTES, SCALAR, TUPLE
from echelon.transport.tensors import DTYPES as TENSOR_DTYPES

pack = msgspec.msgpack.encode
Ext = msgspec.msgpack.Ext


def travel(message: object) -> Any:
    """Returns `message` after a round trip, with the frames as bytes, as a socket delivers them."""
    return decode([bytes(frame) for frame in encode(message)])


def same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal in type and value; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=2000)
)
numpy_scalars = st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.uint8(255), np.float64("nan")])
arrays = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    st.sampled_from(sorted(ARRAY_DTYPES)),
    st.lists(st.integers(0, 4), max_size=4),
)
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(TENSOR_DTYPES[dtype]),
    st.sampled_from(sorted(TENSOR_DTYPES)),
    st.lists(st.integers(0, 4), max_size=4),
)
messages = st.recursive(
    scalars | numpy_scalars | arrays | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(messages)
@settings(deadline=None, max_examples=200)
def test_every_message_comes_back_as_it_was(message: object) -> None:
    assert same(travel(message), message)


def test_arrays_come_back_writable_and_native() -> None:
    source = np.arange(6, dtype=">i4").reshape(2, 3).T
    array, tensor = travel((source, torch.ones(3, requires_grad=True)))
    assert array.dtype == np.dtype("int32") and array.tolist() == source.tolist()
    array[0, 0] = 9
    tensor += 1
    assert array[0, 0] == 9 and tensor.tolist() == [2, 2, 2] and not tensor.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="sends a tensor of a GPU, and torch sees none here")
def test_a_tensor_of_a_gpu_arrives_on_the_cpu() -> None:
    tensor = travel(torch.arange(6.0, device="cuda").view(2, 3).T)
    assert tensor.is_cpu and tensor.tolist() == [[0, 3], [1, 4], [2, 5]]


@given(messages)
@settings(deadline=None, max_examples=100)
def test_views_are_the_same_message(message: object) -> None:
    assert same(decode([memoryview(bytearray(frame)) for frame in encode(message)], copy=False), message)


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)])
def test_without_a_copy_arrays_are_views_that_keep_their_frame(value: Any) -> None:
    header, body = encode(value)
    frame = memoryview(bytearray(body))
    view = decode([header, frame], copy=False)
    view[1, 2] = 9.0
    assert frame[40 if value[0, 0].itemsize == 8 else 20 :].tobytes() == np.asarray(view[1, 2]).tobytes()
    assert decode([header, frame])[1, 2] == 9.0 and value[1, 2] == 5.0
    del frame
    assert view.tolist() == [[0, 1, 2], [3, 4, 9]]


@pytest.mark.parametrize("value", [np.arange(5.0), torch.arange(5, dtype=torch.int16)])
def test_what_cannot_be_a_view_is_copied(value: Any) -> None:
    header, body = encode(value)
    shifted = memoryview(bytearray(b"x" + bytes(body)))[1:]
    for frame in (bytes(body), memoryview(bytes(body)), shifted):
        copied = decode([header, frame], copy=False)
        copied[0] = 7
        assert copied.tolist() == [7, 1, 2, 3, 4] and bytes(frame) == bytes(body)
        address = copied.ctypes.data if isinstance(copied, np.ndarray) else copied.data_ptr()
        assert address % copied.itemsize == 0


def test_long_descriptions_of_frames_are_refused_and_not_remembered() -> None:
    with pytest.raises(Refused, match="extension 3"):
        decode([pack(Ext(ARRAY, pack(["float32", [1] * 1000]))), b"1234"])


def test_large_values_travel_beside_the_header() -> None:
    frames = encode({"weights": np.zeros(1000), "blob": b"x" * 1025, "small": b"x" * 1024})
    assert [len(frame) for frame in frames[1:]] == [8000, 1025]


def test_what_a_module_gives_arrives_as_plain_containers() -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    arrived, shape, nothing = travel((state, state["weight"].shape, OrderedDict()))
    assert type(arrived) is dict and same(arrived, dict(state))
    assert type(shape) is tuple and shape == (3, 2) and same(nothing, {})


Point = namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"a": [1, object()]}, ["message['a'][1]", "builtins.object"]),
        ((Point(1, 2),), ["message[0]", "Point"]),
        ([Color.RED], ["message[0]", "Color"]),
        ({"s": {1}}, ["message['s']", "builtins.set"]),
        (OrderedDict(s={1}), ["message['s']", "builtins.set"]),
        ([torch.float32], ["message[0]", "torch.dtype"]),
        ([torch.device("cpu")], ["message[0]", "torch.device"]),
        ({1.5: 0}, ["message", "1.5", "float"]),
        ({True: 0}, ["message", "True", "bool"]),
        ([2**64], ["message[0]", "65 bits"]),
        (["\ud800"], ["message[0]", "UTF-8"]),
        ([np.array(["a"])], ["message[0]", "str"]),
        ([np.array([None])], ["message[0]", "object"]),
        ([np.ma.masked_array([1], [True])], ["message[0]", "MaskedArray"]),
        ([np.str_("a")], ["message[0]", "str"]),
        ([torch.ones(2, dtype=torch.complex64)], ["message[0]", "complex64"]),
        ([torch.ones(2, 2).to_sparse()], ["message[0]", "sparse"]),
        ([torch.ones(2, device="meta")], ["message[0]", "meta"]),
        ([Ext(TUPLE, b"")], ["message[0]", "Ext"]),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(message: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        encode(message)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_sender_keeps_to_the_limits() -> None:
    with pytest.raises(ConfigError, match="300 bytes"):
        encode(np.zeros(300, np.uint8), Limits(total_bytes=299))
    with pytest.raises(ConfigError, match="header"):
        encode("x" * 100, Limits(header_bytes=50))
    with pytest.raises(ConfigError, match="3 buffers"):
        encode([np.zeros(1)] * 3, Limits(frames=2))
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(ConfigError, match="cycle"):
        encode(cycle)


def array_header(dtype: object, shape: object, code: int = ARRAY) -> bytes:
    return pack(Ext(code, pack([dtype, shape])))


@pytest.mark.parametrize(
    ("frames", "word"),
    [
        ([], "0 frames"),
        ([b""], "header"),
        ([b"\xc1"], "header"),
        ([b"\xdd\xff\xff\xff\xff"], "truncated"),
        ([b"\xa2\xff\xff"], "utf-8"),
        ([pack([[[[1]]]])], "containers deep"),
        ([b"\xd6\xff\x00\x00\x00\x01"], "datetime"),
        ([b"\x81\x91\x01\x01"], "tuple"),
        ([pack({b"k": 1})], "bytes"),
        ([pack(1), b"extra"], "use them all"),
        ([pack(Ext(BYTES, b""))], "more frames"),
        ([pack(Ext(BYTES, b"x")), b""], "extension 2"),
        ([pack(Ext(TUPLE, b""))], "extension 1"),
        ([pack([1, Ext(TUPLE, b"")])], "extension 1"),
        ([pack(Ext(77, b"x"))], "extension 77"),
        ([pack(Ext(ARRAY, b"\xc1")), b""], "malformed"),
        ([array_header("object", [1]), b"12345678"], "object"),
        ([array_header("V8", [1]), b"12345678"], "V8"),
        ([array_header("float32", [3]), b"12345678"], "does not fit"),
        ([array_header("float32", [-1]), b"1234"], "negative"),
        ([array_header("float32", [2**62, 4]), b""], "bytes"),
        ([array_header("float32", [0, 2**40, 2**40]), b""], "bytes"),
        ([array_header("float32", [1] * 33), b"1234"], "33 dimensions"),
        ([array_header("float32", 3), b"1234"], "malformed"),
        ([array_header("bool", [2]), b"\x00\x02"], "neither 0 nor 1"),
        ([pack(Ext(SCALAR, pack(["float32", b"123"])))], "3 bytes"),
        ([pack(Ext(SCALAR, pack(["object", b"12345678"])))], "object"),
        ([pack("x" * 1001)], "header of 1004 bytes"),
        ([pack(Ext(BYTES, b"")), b"x" * 5000], "bytes was refused"),
        ([pack(1)] * 9, "9 frames"),
    ],
)
def test_hostile_frames_are_refused_with_the_reason(frames: list[bytes], word: str) -> None:
    with pytest.raises(Refused, match=word):
        decode(frames, Limits(header_bytes=1000, total_bytes=4096, frames=7, depth=3))


def test_a_bottomless_header_is_refused() -> None:
    with pytest.raises(Refused, match="recursion"):
        decode([b"\x91" * 1_000_000])
    with pytest.raises(Refused, match="32 containers"):
        decode([b"\x91" * 33 + b"\xc0"])


WITHOUT_TORCH = """
import sys
from collections import OrderedDict
import numpy as np
from echelon.errors import ConfigError
from echelon.transport.codec import decode, encode

message = OrderedDict(array=np.arange(3), scalar=np.float32(2.0), others=[1, (None, "a")])
there = decode([bytes(frame) for frame in encode(message)])
assert there["array"].tolist() == [0, 1, 2] and there["scalar"] == 2.0 and there["others"] == [1, (None, "a")]
try:
    encode(object())
except ConfigError:
    pass
assert "torch" not in sys.modules
frames = [bytes.fromhex(frame) for frame in sys.argv[1:]]
tensor = decode(frames)
assert tensor.tolist() == [1.0, 2.5] and [bytes(frame) for frame in encode(tensor)] == frames
"""


def test_torch_is_imported_with_the_first_tensor() -> None:
    frames = [bytes(frame).hex() for frame in encode(torch.tensor([1.0, 2.5]))]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *frames], check=True, timeout=60)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(deadline=None, max_examples=300)
def test_random_bytes_decode_or_are_refused(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except Refused as refused:
        assert str(refused)


@given(messages, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=300)
def test_mutated_messages_decode_or_are_refused(message: object, chance: random.Random) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(chance.randint(1, 4)):
        frame = frames[0] if chance.random() < 0.8 else chance.choice(frames)
        if not frame:
            continue
        place = chance.randrange(len(frame))
        match chance.randrange(4):
            case 0:
                frame[place] = chance.randrange(256)
            case 1:
                del frame[place:]
            case 2:
                frame.insert(place, chance.randrange(256))
            case 3:
                frames.append(bytearray(frame[:place]))
    try:
        decode([bytes(frame) for frame in frames])
    except Refused as refused:
        assert str(refused)
