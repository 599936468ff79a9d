"""Tensors in JSON round-trip bit for bit; an error about a wrong tensor names its field."""

import contextlib
import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flashpoint_contract.schemas.jsonwire import DTYPES, FieldError, decode, encode
from flashpoint_contract.wire import WireError


def test_a_message_is_read():
    tensors, rest = decode(
        b'{"q": [[1, 2.5]], "k": {"shape": [1, 2], "data": [1e-3, -1]}, "attn_mask": [[true]], "kv_lengths": [1],'
        b' "sinks": ["-Infinity"], "dtype": "bfloat16", "causal": true, "no_such": [1]}'
    )
    assert rest == {"causal": True, "no_such": [1]}
    assert {name: t.dtype for name, t in tensors.items()} == {
        "q": ml_dtypes.bfloat16, "k": ml_dtypes.bfloat16, "attn_mask": bool, "kv_lengths": np.int64,
        "sinks": np.float32,
    }  # fmt: skip
    assert tensors["q"].astype(float).tolist() == [[1, 2.5]]
    assert tensors["sinks"].tolist() == [-math.inf]


def test_the_default_is_float32_and_a_mask_of_numbers_is_a_float_mask():
    tensors, _ = decode(b'{"q": [[0.1]], "attn_mask": [[0, "-Infinity"]], "alibi_slopes": [1], "dattn_mask": [[1, 0]]}')
    assert len(tensors) == 4
    assert all(t.dtype == np.float32 for t in tensors.values())
    assert tensors["attn_mask"].tolist() == [[0, -math.inf]]


@pytest.mark.parametrize(
    "mask", [[[1, 0]], [[1, 1]], {"shape": [1, 2], "data": [0, 1]}, {"shape": [], "data": [1]}, [[[1], [0]]]]
)
def test_a_mask_of_the_integers_0_and_1_alone_is_refused(mask):
    with pytest.raises(FieldError, match="attn_mask: holds only 0 and 1: write true and false") as info:
        decode(json.dumps({"attn_mask": mask}).encode())
    assert info.value.message.endswith("numbers are added to scores, write 1.0 to add 1")


@pytest.mark.parametrize("mask", [[[0, 0]], [[1.0, 0.0]], [[1, 0.0]], [[1, 2]], [[0, -1]], [[1, "-Infinity"]]])
def test_a_mask_of_other_numbers_is_added(mask):
    tensors, _ = decode(json.dumps({"attn_mask": mask, "sinks": [1, 0]}).encode())
    assert tensors["attn_mask"].dtype == np.float32
    assert tensors["attn_mask"].tolist() == [[float(x) for x in mask[0]]]
    assert decode(encode(tensors, {}))[0]["attn_mask"].tolist() == tensors["attn_mask"].tolist()


@pytest.mark.parametrize("name", ["q", "attn_mask", "kv_lengths", "block_mask"])
def test_null_is_named(name):
    with pytest.raises(FieldError, match=f"{name}: holds null"):
        decode(json.dumps({name: [[None]]}).encode())


def test_empty_tensors_keep_their_shape():
    tensors, _ = decode(b'{"q": {"shape": [0, 3, 2], "data": []}, "k": [], "v": [[], []]}')
    assert {name: t.shape for name, t in tensors.items()} == {"q": (0, 3, 2), "k": (0,), "v": (2, 0)}


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"3", b"{", b'{"q": NaN}', b'{"q": [1], "q": [1]}', b"\xff", b"[" * 100_000,
     b'{"q": ' + b"[" * 100_000,
     b'{"a":' * 50_000, b'{"backend": "\\ud800"}', b'{"q": [' + b"1" * 5000 + b"]}", b'{"q": [1]} x'],
)  # fmt: skip
def test_what_cannot_be_parsed_is_a_wire_error(body):
    with pytest.raises(WireError):
        decode(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q", [[1, 2], [3]]), ("q", [[1], 2]), ("q", [1, [2]]), ("q", [[1], [[2]]]), ("q", 3), ("q", None),
        ("q", "NaN"),
        ("q", [None]), ("q", [True]), ("q", ["nan"]), ("q", [{}]), ("q", [1e39]), ("q", [10**400]),
        ("q", {"shape": [1]}),
        ("q", {"shape": [2], "data": [1]}), ("q", {"shape": [-1], "data": []}), ("q", {"shape": [True], "data": [1]}),
        ("q", {"shape": [1], "data": [[1]]}), ("q", {"shape": [1], "data": [1], "dtype": "float32"}),
        ("q", {"shape": [0, 1 << 62], "data": []}), ("q", {"shape": 1, "data": [1]}),
        ("q", {"shape": [1] * 17, "data": [1]}),
        ("k", json.loads("[" * 20 + "1" + "]" * 20)), ("attn_mask", [[True, 1.0]]), ("attn_mask", [[True, "NaN"]]),
        ("kv_lengths", [1.0]), ("kv_lengths", [True]), ("kv_lengths", [1 << 63]), ("cu_seqlens_q", ["1"]),
        ("dtype", "float8"), ("dtype", 32), ("dtype", ["float32"]),
    ],
)  # fmt: skip
def test_what_is_no_tensor_is_a_field_error_that_names_it(field, value):
    with pytest.raises(FieldError) as info:
        decode(json.dumps({"v": [[1.0]], field: value}).encode())
    assert info.value.field == field
    assert info.value.message in str(info.value)


def test_a_number_beyond_the_dtype_is_refused_and_a_written_infinity_is_not():
    with pytest.raises(FieldError, match="beyond float16"):
        decode(b'{"q": [70000], "dtype": "float16"}')
    with pytest.raises(FieldError, match="beyond float64"):
        decode(b'{"q": [1e999], "dtype": "float64"}')
    assert decode(b'{"q": ["Infinity"], "dtype": "float16"}')[0]["q"].tolist() == [math.inf]


def test_an_answer_is_written_with_short_numbers_and_words():
    body = encode(
        {"o": np.array([[0.1, math.nan], [math.inf, -math.inf]], np.float32)}, {"dtype": "float32", "backend": "cpu"}
    )
    assert json.loads(body) == {"dtype": "float32", "backend": "cpu", "o": [[0.1, "NaN"], ["Infinity", "-Infinity"]]}
    assert json.loads(encode({"o": np.zeros((2, 0), np.float32)}, {})) == {"o": {"shape": [2, 0], "data": []}}


def arrays(dtype):
    """Return a strategy of arrays of a dtype with any values. bfloat16, unknown to hypothesis, is drawn as uint16."""
    shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=3)
    if dtype != "bfloat16":
        return hnp.arrays(DTYPES[dtype], shapes)
    return hnp.arrays(np.uint16, shapes).map(lambda a: a.view(ml_dtypes.bfloat16))


@settings(max_examples=60)
@given(st.sampled_from(sorted(DTYPES)).flatmap(lambda dtype: st.tuples(st.just(dtype), arrays(dtype))))
def test_tensors_round_trip_bit_for_bit(pair):
    dtype, array = pair
    read = decode(encode({"o": array}, {"dtype": dtype}))[0]["o"]
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    nan = np.isnan(array.astype(np.float64))
    assert np.array_equal(np.isnan(read.astype(np.float64)), nan)
    assert read[~nan].tobytes() == array[~nan].tobytes()


def test_one_number_keeps_its_shape():
    tensors, _ = decode(b'{"attn_mask": {"shape": [], "data": [0.5]}}')
    assert tensors["attn_mask"].shape == ()
    assert json.loads(encode(tensors, {})) == {"attn_mask": {"shape": [], "data": [0.5]}}


def test_sizes_that_python_does_not_spell_are_a_field_error():
    size = b"9" * 4000
    with pytest.raises(FieldError, match="overflows"):
        decode(b'{"q": {"shape": [%s, %s], "data": []}}' % (size, size))


def test_lists_of_lists_are_refused_before_they_are_too_deep_to_be_handed_on():
    deep = b"[" * 900 + b"]" * 900
    with pytest.raises(FieldError, match="window"):
        decode(b'{"q": [[1]], "window": %s}' % deep)
    with pytest.raises(FieldError, match="causal"):
        decode(b'{"causal": %s1%s}' % (b'{"a": ' * 900, b"}" * 900))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(body):
    for text in (body, b'{"q": ' + body + b"}"):
        with contextlib.suppress(WireError, FieldError):
            decode(text)
