"""Fields of the kernels' named tuples have no name that Triton's tuples use; equal Constants are one key of a dict."""

from dataclasses import fields, replace
from typing import Any

import triton.language as tl

from flashpoint_kernels.triton_backend.kernels import groups
from flashpoint_kernels.triton_backend.kernels.groups import Constants


def test_no_field_has_the_name_of_an_attribute_of_tritons_tuples() -> None:
    named: list[Any] = [each for each in vars(groups).values() if hasattr(each, "_fields")]
    assert len(named) > 8
    for each in named:
        assert not {"type", "values"} & set(each._fields), each


def test_constants_are_one_key_if_and_only_if_they_are_equal() -> None:
    plain = Constants(LEVEL=0, DTYPE=tl.float16, BLOCK_M=64, PACKED=False)
    kept = {plain: "plain"}
    again = Constants(LEVEL=0, DTYPE=tl.float16, BLOCK_M=64, PACKED=False)
    assert hash(again) == hash(plain)
    assert kept[again] == "plain"
    others = [replace(plain, **{field.name: 3}) for field in fields(Constants)]
    assert len({plain, *others}) == 1 + len(others)
