"""Arguments with `__torch_function__`, modes and torch.fx are asked by every public function, as by torch's own."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import flashpoint_kernels
from flashpoint_kernels import (
    attention,
    attention_backward,
    attention_weights,
    create_block_mask,
    dequantize,
    flash_attn,
    flex_attention,
    key_weights,
    merge,
    quantize,
    scaled_dot_product_attention,
)
from flashpoint_kernels.flash_attn import bert_padding
from flashpoint_kernels.flash_attn.layers import rotary
from flashpoint_kernels.flash_attn.layers.rotary import apply_rotary_emb
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal

Function = Callable[..., Any]

Q, ROWS, LSE = normal(2, 4, 6, 8), normal(2, 6, 4, 8), normal(2, 4, 6)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
ANGLES = normal(6, 4)
VALUES, SCALE = quantize(Q, torch.int8)
VALID = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.int32, device=DEVICE)
WHERE = torch.tensor([0, 1, 6, 7, 8, 9], dtype=torch.int64, device=DEVICE)
PACKED, CACHE = normal(6, 4, 8), (normal(2, 9, 4, 8), normal(2, 9, 4, 8))

# Each public function with the arguments of a call, and another argument that may be of a special class.
CALLS: dict[str, tuple[Function, tuple[Any, ...], dict[str, Any]]] = {
    "attention": (attention, (Q, Q, Q), {"attn_mask": normal(6, 6)}),
    "attention, sinks": (attention, (Q, Q, Q), {"sinks": normal(4)}),
    "attention_backward": (attention_backward, (Q, Q, Q, Q), {"attn_mask": normal(6, 6)}),
    "key_weights": (key_weights, (Q, Q), {"attn_mask": normal(6, 6)}),
    "attention_weights": (attention_weights, (Q, Q), {"rows": [0, 4]}),
    "merge": (merge, ([Q, Q], [LSE, LSE]), {}),
    "sdpa": (scaled_dot_product_attention, (Q, Q, Q), {"attn_mask": normal(6, 6)}),
    "flex_attention": (flex_attention, (Q,), {"key": Q, "value": Q}),
    "flash_attn_func": (flash_attn.flash_attn_func, (ROWS,), {"k": ROWS, "v": ROWS}),
    "kvpacked": (flash_attn.flash_attn_kvpacked_func, (ROWS,), {"kv": normal(2, 6, 2, 4, 8)}),
    "qkvpacked": (flash_attn.flash_attn_qkvpacked_func, (normal(2, 6, 3, 4, 8),), {}),
    "varlen": (flash_attn.flash_attn_varlen_func, (PACKED, PACKED, PACKED, ENDS, ENDS, 4, 4), {}),
    "varlen_kvpacked": (flash_attn.flash_attn_varlen_kvpacked_func, (PACKED, normal(6, 2, 4, 8), ENDS, ENDS, 4, 4), {}),
    "varlen_qkvpacked": (flash_attn.flash_attn_varlen_qkvpacked_func, (normal(6, 3, 4, 8), ENDS, 4), {}),
    "create_block_mask": (create_block_mask, (Q > 0,), {}),
    "apply_rotary_emb": (apply_rotary_emb, (ROWS, ANGLES), {"sin": ANGLES}),
    "quantize": (quantize, (Q,), {}),
    "dequantize": (dequantize, (VALUES,), {"scale": SCALE}),
    "index_first_axis": (bert_padding.index_first_axis, (PACKED,), {"indices": WHERE[:2]}),
    "index_first_axis_residual": (bert_padding.index_first_axis_residual, (PACKED,), {"indices": WHERE[:2]}),
    "index_put_first_axis": (bert_padding.index_put_first_axis, (PACKED, WHERE, 12), {}),
    "pad_input": (bert_padding.pad_input, (PACKED, WHERE, 2, 6), {}),
    "unpad_input": (bert_padding.unpad_input, (ROWS,), {"attention_mask": VALID}),
    "unpad_concatenated": (bert_padding.unpad_input_for_concatenated_sequences, (ROWS, VALID), {}),
    "apply_rotary_emb_torch": (rotary.apply_rotary_emb_torch, (ROWS, ANGLES, ANGLES), {}),
    "apply_rotary_emb_qkv_": (rotary.apply_rotary_emb_qkv_, (normal(2, 6, 3, 4, 8), ANGLES, ANGLES), {}),
    "apply_rotary_emb_kv_": (rotary.apply_rotary_emb_kv_, (normal(2, 6, 2, 4, 8), ANGLES), {"sin": ANGLES}),
    "kvcache": (flash_attn.flash_attn_with_kvcache, (ROWS,), {"k_cache": CACHE[0], "v_cache": CACHE[1]}),
}
calls = pytest.mark.parametrize(("function", "args", "more"), CALLS.values(), ids=CALLS)


class Seen(TorchFunctionMode):
    """Records the functions that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Function] = []

    def __torch_function__(
        self, function: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.functions.append(function)
        return function(*args, **kwargs or {})


class Mask:
    """A class of masks that is no tensor; it answers calls itself."""

    told: Function

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cls.told = function
        return "an answer"


class Named(torch.Tensor):
    """A subclass without methods of its own."""


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with a copy of the first one, which some functions change."""
    return (args[0].clone() if isinstance(args[0], Tensor) else args[0], *args[1:])


def flat(answer: Any) -> list[Tensor]:
    return [answer] if isinstance(answer, Tensor) else [t for t in answer if isinstance(t, Tensor)]


def test_the_list_has_each_public_function_that_takes_tensors() -> None:
    others = {
        "available_backends",
        "judge",
        "run",
        "verify",
        "install",
        "uninstall",
    }  # they take no tensors of a caller
    modules = (flashpoint_kernels, flash_attn, bert_padding, rotary)
    names = {name: module for module in modules for name in getattr(module, "__all__", vars(module))}
    public = {
        getattr(module, name)
        for name, module in names.items()
        if name not in others
        and isinstance(getattr(module, name), FunctionType)
        and getattr(module, name).__module__.startswith(module.__name__)
        and name[0] != "_"
    }
    assert public - {function for function, _, _ in CALLS.values()} == set()


@calls
def test_a_mode_is_told_the_public_function_and_its_arguments(
    function: Function, args: tuple[Any, ...], more: dict[str, Any]
) -> None:
    expected = flat(function(*copied(args), **more))
    args = copied(args)
    with Seen() as seen:
        actual = flat(function(*args, **more))
    assert seen.functions == [function]
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@calls
def test_any_argument_may_answer_in_the_place_of_the_function(
    function: Function, args: tuple[Any, ...], more: dict[str, Any]
) -> None:
    for n in range(len(args)):
        if isinstance(args[n], Tensor):
            assert function(*args[:n], Mask(), *args[n + 1 :], **more) == "an answer"
            assert Mask.told is function
    for name in more:
        assert function(*args, **more | {name: Mask()}) == "an answer"
    if function is merge:
        assert merge([Q, Mask()], [LSE, LSE]) == merge([Q, Q], [Mask(), LSE]) == "an answer"  # type: ignore[list-item, comparison-overlap]


@calls
def test_a_subclass_of_tensor_comes_back(function: Function, args: tuple[Any, ...], more: dict[str, Any]) -> None:
    def named(t: Any) -> Any:
        return t.clone().as_subclass(Named) if isinstance(t, Tensor) else t

    first = [named(t) for t in args[0]] if isinstance(args[0], list) else named(args[0])
    actual, expected = flat(function(first, *args[1:], **more)), flat(function(*copied(args), **more))
    assert all(type(t) is Named for t in actual if t.is_floating_point())  # counts and indices come from the mask
    assert all(torch.equal(t.as_subclass(Tensor), e) for t, e in zip(actual, expected, strict=True))


@calls
def test_torch_fx_records_a_call_of_the_public_function(
    function: Function, args: tuple[Any, ...], more: dict[str, Any]
) -> None:
    if function is merge:
        args = (args[0][0], args[1])

    class Model(nn.Module):
        def forward(self, first: Any) -> Any:
            return function([first, first] if function is merge else first, *rest)

    rest = [*args[1:], *(t for name, t in more.items() if name not in ("attn_mask", "sinks"))]
    nodes = torch.fx.Tracer().trace(Model()).nodes
    assert [node.target for node in nodes if node.op == "call_function"] == [function]


def test_a_program_of_torch_fx_runs_and_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", scaled_dot_product_attention)

    program = torch.fx.symbolic_trace(
        lambda q, lse: functional.scaled_dot_product_attention(merge([q, q], [lse, lse])[0], q, q, is_causal=True)
    )
    expected = scaled_dot_product_attention(merge([Q, Q], [LSE, LSE])[0], Q, Q, is_causal=True)
    for made in (program, pickle.loads(pickle.dumps(program))):
        assert torch.equal(made(Q, LSE), expected)
        targets = [node.target for node in made.graph.nodes]
        assert scaled_dot_product_attention in targets
        assert merge in targets


def test_a_class_of_masks_for_torchs_function_is_told_ours_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Diagonal(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is functional.scaled_dot_product_attention:
                return functional.scaled_dot_product_attention(*args[:3], is_causal=True)
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]

    mask = torch.zeros(1).as_subclass(Diagonal)
    expected = functional.scaled_dot_product_attention(Q, Q, Q, mask)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    actual = functional.scaled_dot_product_attention(Q, Q, Q, mask)
    assert torch.equal(actual, scaled_dot_product_attention(Q, Q, Q, is_causal=True))
    torch.testing.assert_close(actual, expected)


def test_torchs_causal_bias_runs_on_our_kernels_and_a_mode_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.bias import causal_lower_right

    monkeypatch.setattr(functional, "scaled_dot_product_attention", scaled_dot_product_attention)
    q, bias = Q[:, :, 2:], causal_lower_right(4, 6)
    with Seen() as seen:
        o = functional.scaled_dot_product_attention(q, Q, Q, bias)
    assert seen.functions == [scaled_dot_product_attention]
    assert torch.equal(o, attention(q, Q, Q, causal=True))


def test_torch_compile_sees_one_graph_under_a_mode() -> None:
    def step(q: Tensor) -> Tensor:
        return attention(q, q, q) + scaled_dot_product_attention(q, q, q, is_causal=True)

    with Seen():
        assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(Q), step(Q))
