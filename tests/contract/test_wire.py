"""A safetensors head is parsed strictly; the safetensors library and Flashpoint read each other's messages."""

import contextlib
import json
import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from flashpoint_contract.wire import (
    HEAD_LIMIT,
    ITEMSIZE,
    WireError,
    build_head,
    decode_options,
    encode_options,
    head_size,
    parse_head,
)


def head_of(entries, pad=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text + pad).to_bytes(8, "little") + text + pad


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def test_a_head_is_read():
    head = parse_head(
        head_of({"b": entry("I64", [1], [24, 32]), "a": entry(), "__metadata__": {"causal": "true"}}, b"  ")
    )
    assert head.tensors == (("a", "float32", (2, 3), 0, 24), ("b", "int64", (1,), 24, 32))
    assert (head.metadata, head.data_size) == ({"causal": "true"}, 32)


def test_an_empty_message_and_empty_tensors_are_read():
    assert parse_head(head_of({})).data_size == 0
    head = parse_head(
        head_of({"a": entry(), "z": entry(shape=[0, 4], offsets=[24, 24]), "y": entry(shape=[0], offsets=[0, 0])})
    )
    assert [t.name for t in head.tensors] == ["y", "a", "z"]


BAD = {
    "not UTF-8": b'{"\xff": 1}',
    "not JSON": b'{"q": ',
    "an array": b"[]",
    "leading space": b" {}",
    "empty": b"",
    "two values": b"{} {}",
    "NaN": b'{"__metadata__": NaN}',
    "duplicate tensors": b'{"q": %s, "q": %s}' % ((json.dumps(entry()).encode(),) * 2),
    "duplicate keys": b'{"q": {"dtype": "F32", "dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
    "deep": b'{"q": ' + b"[" * 100_000,
    "deep objects": b'{"q": ' * 50_000,
    "half a surrogate": b'{"\\ud800": ' + json.dumps(entry()).encode() + b"}",
    "a huge integer": b'{"q": ' + b"9" * 5000 + b"}",
    "unknown key": {"q": entry(strides=[1])},
    "missing key": {"q": {"dtype": "F32", "shape": [0]}},
    "no object": {"q": 3},
    "unknown dtype": {"q": entry("F31")},
    "dtype of another type": {"q": entry(["F32"])},
    "negative size": {"q": entry(shape=[-2, -3])},
    "float size": {"q": entry(shape=[2.0, 3])},
    "bool size": {"q": entry(shape=[True, 6])},
    "string size": {"q": entry(shape=["2", 3])},
    "shape not a list": {"q": {"dtype": "F32", "shape": 6, "data_offsets": [0, 24]}},
    "overflow": {"q": entry(shape=[1 << 62, 4], offsets=[0, 0])},
    "overflow behind a zero": {"q": entry(shape=[0, 1 << 62, 4], offsets=[0, 0])},
    "size beyond 63 bits": {"q": entry(shape=[1 << 63, 0], offsets=[0, 0])},
    "too many dimensions": {"q": entry(shape=[1] * 17, offsets=[0, 4])},
    "too few bytes": {"q": entry(offsets=[0, 23])},
    "too many bytes": {"q": entry(offsets=[0, 25])},
    "a wider dtype": {"q": entry("F64")},
    "three offsets": {"q": entry(offsets=[0, 24, 48])},
    "negative offset": {"q": entry(offsets=[-24, 0])},
    "backward offsets": {"q": entry(shape=[0], offsets=[4, 0])},
    "float offset": {"q": entry(offsets=[0, 24.0])},
    "bool offset": {"q": entry(shape=[1], dtype="U8", offsets=[False, True])},
    "a hole at the start": {"q": entry(offsets=[8, 32])},
    "a hole between": {"q": entry(), "k": entry(offsets=[32, 56])},
    "overlap": {"q": entry(), "k": entry(offsets=[16, 40])},
    "the same bytes twice": {"q": entry(), "k": entry()},
    "too many tensors": {str(i): entry(shape=[0], offsets=[0, 0]) for i in range(65)},
    "metadata of numbers": {"__metadata__": {"causal": True}},
    "metadata no object": {"__metadata__": []},
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_what_is_not_a_head_is_refused(bad):
    with pytest.raises(WireError):
        parse_head(head_of(bad))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, HEAD_LIMIT - 7])
def test_a_length_over_the_limit_is_refused_before_anything_is_read(length):
    with pytest.raises(WireError, match="over the limit"):
        head_size(length.to_bytes(8, "little"))


def test_the_length_must_be_the_length():
    head = head_of({"q": entry()})
    assert head_size(head[:8]) == len(head)
    for wrong in (head[:-1], head + b" ", head[:7], b""):
        with pytest.raises(WireError):
            parse_head(wrong)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_error(text):
    for head in (text, head_of(text), head_of(b"{" + text + b"}")):
        with contextlib.suppress(WireError):
            parse_head(memoryview(head))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "BOOL", "BF16", "X"]) | JSON,
    "shape": st.lists(st.integers(-1, 4) | JSON, max_size=3),
    "data_offsets": st.lists(st.integers(-1, 64), max_size=3) | JSON,
})  # fmt: skip


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["q", "k", "__metadata__"]) | st.text(max_size=3), ENTRY | JSON, max_size=3))
def test_a_head_that_parses_describes_its_bytes_exactly(entries):
    try:
        head = parse_head(head_of(entries))
    except (WireError, UnicodeEncodeError):
        return
    end = 0
    for name, dtype, shape, start, stop in head.tensors:
        assert start == end
        assert stop - start == math.prod(shape) * ITEMSIZE[dtype]
        assert name in entries
        end = stop
    assert head.data_size == end


NAME = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")
TENSOR = st.tuples(NAME, st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 50), max_size=5))
METADATA = st.dictionaries(NAME, st.text(st.characters(codec="utf-8"), max_size=20), max_size=4)


@pytest.mark.slow
@settings(max_examples=50)
@given(st.lists(TENSOR, max_size=6, unique_by=lambda t: t[0]), METADATA)
def test_what_is_built_is_read_back(tensors, metadata):
    built = build_head(tensors, metadata)
    assert len(built) % 8 == 0
    head = parse_head(built)
    assert head.metadata == metadata
    assert head.size == len(built)
    by_name = {t.name: (t.dtype, t.shape) for t in head.tensors}
    assert by_name == {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
    assert head.data_size == sum(math.prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors)


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ValueError, match="already used"):
        build_head([("q", "float32", (1,)), ("q", "float32", (1,))], {})
    with pytest.raises(ValueError, match="already used"):
        build_head([("__metadata__", "float32", (1,))], {})
    with pytest.raises(ValueError, match="complex64"):
        build_head([("q", "complex64", (1,))], {})
    with pytest.raises(ValueError, match="over the limit"):
        build_head([], {"note": "x" * HEAD_LIMIT})


def test_the_safetensors_library_reads_what_we_write():
    arrays = {
        "q": np.arange(6, dtype=np.float32).reshape(2, 3),
        "flag": np.array([True, False]),
        "z": np.zeros((0, 2), np.int64),
    }
    head = build_head([(n, a.dtype.name, a.shape) for n, a in arrays.items()], {"causal": "true", "é": "ü"})
    read = safetensors.numpy.load(head + b"".join(a.tobytes() for a in arrays.values()))
    assert {n: a.tolist() for n, a in read.items()} == {n: a.tolist() for n, a in arrays.items()}


def test_we_read_what_the_safetensors_library_writes():
    arrays = {"q": np.arange(6, dtype=np.float16).reshape(2, 3), "lengths": np.array([1, 2], np.int32)}
    body = safetensors.numpy.save(arrays, metadata={"format": "np", "causal": "true"})
    head = parse_head(body[: head_size(body[:8])])
    assert decode_options(head.metadata) == {"causal": True}
    for name, dtype, shape, start, stop in head.tensors:
        array = np.frombuffer(body[head.size + start : head.size + stop], dtype).reshape(shape)
        assert array.tolist() == arrays[name].tolist()


@pytest.mark.parametrize("bad", ["overlap", "a hole between", "too many bytes", "unknown dtype", "negative size"])
def test_the_safetensors_library_agrees_about_what_is_bad(bad):
    with pytest.raises((SafetensorError, ValueError, OverflowError)):
        safetensors.numpy.load(head_of(BAD[bad]) + bytes(64))


@settings(max_examples=50)
@given(st.dictionaries(NAME.filter(lambda name: name != "format"), JSON, max_size=4))
def test_options_round_trip(options):
    try:
        metadata = encode_options(options)
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # half of a surrogate pair is invalid text
    assert decode_options(parse_head(build_head([], metadata)).metadata) == options


def test_options_read_as_the_contract_writes_them():
    metadata = {
        "causal": "true",
        "window": "[128, 0]",
        "layout": "bshd",
        "scale": "0.5",
        "format": "pt",
        "softcap": "NaN",
    }
    assert decode_options(metadata) == {
        "causal": True, "window": [128, 0], "layout": "bshd", "scale": 0.5, "softcap": "NaN",
    }  # fmt: skip
    assert encode_options({"layout": "bshd", "causal": True, "note": "true", "window": (1, -1)}) == {
        "layout": "bshd", "causal": "true", "note": '"true"', "window": "[1, -1]",
    }  # fmt: skip
