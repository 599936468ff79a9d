"""`HeldMask`, a mask over keys on a server, is the mask of `eager` to models; `plain`: a window says all."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask, sliding_window_causal_mask_function

from flashpoint.integrations.transformers.masks import HeldMask, LengthInCache, held_mask, packed_mask

PADDING = torch.tensor([[False] * 3 + [True] * 6, [True] * 9])
CACHE = object()


def arguments(window=None, padding=None, queries=4, **more):
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return {
        "batch_size": 2, "q_length": queries, "q_offset": 9 - queries, "kv_offset": 0, "mask_function": function,
        "attention_mask": padding, "local_size": window, "config": SimpleNamespace(sliding_window=window), **more,
    }  # fmt: skip


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("window", [None, 3])
def test_its_tensor_is_that_of_transformers(window, padding):
    given, asked = arguments(window, padding), []

    def seen(*at):
        asked.append(at)
        return given["mask_function"](*at)

    mask = held_mask(kv_length=LengthInCache(9, CACHE), **given | {"mask_function": seen})
    assert isinstance(mask, HeldMask)
    assert (mask.cache, mask.window, mask.plain) == (CACHE, window, True)
    assert not asked  # the mask was never computed
    assert mask.shape == (2, 1, 4, 9)
    expected = sdpa_mask(kv_length=9, allow_is_causal_skip=False, **given).expand(2, -1, -1, -1)
    assert torch.equal(mask.allowed().expand(2, -1, -1, -1), expected)
    assert asked
    values = eager_mask(kv_length=9, **given).expand(2, -1, -1, -1)
    assert torch.equal((mask + 0).expand(2, -1, -1, -1), values)
    assert torch.equal(torch.cat([mask, mask], -1)[:, :, -2:, 9:].expand(2, -1, -1, -1), values[:, :, -2:])


def test_it_is_plain_only_if_causality_and_a_window_say_all():
    for change in ({"allow_is_causal_skip": False}, {"use_vmap": True}, {"local_size": 2}):
        assert not held_mask(kv_length=LengthInCache(9, CACHE), **(arguments(3) | change)).plain


def test_keys_that_no_cache_holds_have_the_mask_of_transformers():
    given = arguments(padding=PADDING)
    made = held_mask(kv_length=9, **given)
    assert not isinstance(made, HeldMask)
    assert torch.equal(made.allowed(), sdpa_mask(kv_length=9, **given))
    assert torch.equal(made + 0, eager_mask(kv_length=9, **given))


def test_valid_rows_and_columns_are_selected():
    mask = torch.arange(2 * 4 * 9).view(2, 1, 4, 9)
    columns, rows = torch.tensor([[3, 4], [0, 8]]), torch.tensor([[1], [3]])
    assert packed_mask(mask, columns, rows).tolist() == [[[[12, 13]]], [[[63, 71]]]]
    assert packed_mask(mask[:1], columns, None).shape == (2, 1, 4, 2)
    assert packed_mask(mask, None, None) is mask
