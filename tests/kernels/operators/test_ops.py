"""The torch operators pass opcheck and `torch.compile(fullgraph=True)` with every option, forward and backward."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashpoint_contract.tensors import BACKWARD_TENSORS, FORWARD_TENSORS
from flashpoint_kernels import Options, ProblemError, attention, attention_backward, quantize
from flashpoint_kernels.operators.solving import literal
from tests.conftest import DEVICE
from tests.support.kernels.solving import normal, qkv

FORWARD = torch.ops.flashpoint.attention.default
BACKWARD = torch.ops.flashpoint.attention_backward.default
FORWARD_ONLY = ("pages", "8 bits")
# The positions, among the forward's arguments, of the tensors that the backward takes.
OF_BACKWARD = [n for n, name in enumerate(FORWARD_TENSORS) if name in BACKWARD_TENSORS]
DIFFERENTIABLE = ("q", "k", "v", "attn_mask", "sinks")


def inputs(*shape: int, layout: str = "bhsd", **how: Any) -> dict[str, Tensor]:
    """Return q, k and v; in layout bshd they are strided views, as a projection returns them."""
    t = {name: x for name, x in qkv(*(shape or (2, 4, 5, 7, 8)), kv_heads=2, **how).items() if name != "do"}
    return {name: x.transpose(1, 2) for name, x in t.items()} if layout == "bshd" else t


def index(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def packed() -> dict[str, Tensor]:
    """Return three packed sequences, one of them without keys."""
    t = {"q": normal(9, 4, 8), "k": normal(11, 2, 8, seed=1), "v": normal(11, 2, 8, seed=2)}
    return t | {"cu_seqlens_q": index(0, 4, 6, 9), "cu_seqlens_k": index(0, 4, 4, 11, dtype=torch.int32)}


def pages() -> dict[str, Tensor]:
    """Return two sequences of 5 and 3 keys, in pages of 2 keys."""
    t = inputs(3, 4, 5, 2, 8) | {"q": normal(2, 4, 5, 8)}
    table = index(2, 0, 1, 1, 2, 7, dtype=torch.int32).view(2, 3)
    return t | {"kv_lengths": index(5, 3), "block_table": table}


def eight_bit() -> dict[str, Tensor]:
    t = inputs()
    (k, k_scale), (v, v_scale) = quantize(t["k"], torch.int8), quantize(t["v"], torch.int8)
    return t | {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}


# Tensors and options of calls that together use every tensor and option of the contract.
CASES: dict[str, tuple[Callable[[], dict[str, Tensor]], dict[str, Any]]] = {
    "plain": (inputs, {}),
    "bshd": (lambda: inputs(layout="bshd"), {"layout": "bshd", "causal": True}),
    "thd": (packed, {"layout": "thd", "causal": True, "window": (2, -1)}),
    "one head": (lambda: {name: x[:, 0] for name, x in inputs().items()}, {"causal": True}),
    "one matrix": (lambda: {name: x[0, 0] for name, x in inputs().items()}, {}),
    "top left": (inputs, {"causal": True, "causal_alignment": "top_left"}),
    "window": (inputs, {"window": [1, 2], "scale": 0.3}),
    "softcap": (lambda: inputs(value_dim=12), {"softcap": 2.0, "deterministic": False}),
    "dropout": (inputs, {"dropout_p": 0.4, "dropout_seed": (1 << 64) - 3}),
    "float mask": (lambda: inputs() | {"attn_mask": normal(4, 1, 7)}, {}),
    "bool mask": (lambda: inputs() | {"attn_mask": normal(5, 7) > 0}, {}),
    "block mask": (lambda: inputs(1, 4, 20, 40, 8) | {"block_mask": normal(1, 4, 2, 2) > 0}, {"block_size": [16, 32]}),
    "sinks": (lambda: inputs() | {"sinks": normal(4)}, {"window": (0, 0)}),
    "alibi": (lambda: inputs() | {"alibi_slopes": normal(2, 4).abs()}, {}),
    "lengths": (lambda: inputs() | {"q_lengths": index(5, 2), "kv_lengths": index(0, 6)}, {"causal": True}),
    "offset": (lambda: inputs() | {"offset": index(-1, 4)}, {"causal": True, "window": (3, 1)}),
    "no key": (lambda: inputs(2, 4, 5, 0, 8), {}),
    "tf32": (inputs, {"precision": "tf32", "backend": "tiled"}),
    "bfloat16": (lambda: inputs(dtype=torch.bfloat16), {"causal": True}),
    "float64": (lambda: inputs(dtype=torch.float64), {"backend": "reference"}),
    "pages": (pages, {"causal": True}),
    "8 bits": (eight_bit, {}),
    "triton": (lambda: inputs(1, 2, 3, 3, 8), {"backend": "triton", "causal": True}),
}
OPTION_NAMES = {name for _, options in CASES.values() for name in options}


def leaves(case: str) -> dict[str, Tensor]:
    tensors = CASES[case][0]()
    if case in FORWARD_ONLY:
        return tensors
    return {n: x.detach().requires_grad_() if n in DIFFERENTIABLE and x.is_floating_point() else x
            for n, x in tensors.items()}  # fmt: skip


def arguments(case: str) -> list[Any]:
    """Return the arguments with which `FORWARD` solves the case with this name."""
    tensors, options = leaves(case), CASES[case][1]
    seed = options.get("dropout_seed")
    seed = None if seed is None else torch.tensor(seed - (1 << 64))
    return [*(tensors.get(name) for name in FORWARD_TENSORS), seed, literal(Options(**options))]


def of_backward(given: list[Any]) -> list[Any]:
    """Return those of the arguments of `FORWARD` that `BACKWARD` takes, too: some tensors, and the seed."""
    return [*(given[n] for n in OF_BACKWARD), given[-2]]


def test_the_cases_have_every_option_and_tensor() -> None:
    # The operators always return o, lse and all gradients, and key weights have an operator of their own, so no
    # case has the options that select outputs.
    assert {f.name for f in fields(Options)} - OPTION_NAMES == {"return_lse", "return_key_weights", "grads"}
    assert {name for make, _ in CASES.values() for name in make()} == set(FORWARD_TENSORS)


def cases(fast: Iterable[str], *, without: str = "") -> list[Any]:
    """Return all cases but `without`; cases not in `fast` are marked slow."""
    return [pytest.param(case, marks=[] if case in fast else pytest.mark.slow) for case in CASES if case != without]


# Without the case "triton": it takes 15 s in Triton's interpreter, and what opcheck checks does not depend on backends.
@pytest.mark.parametrize("case", cases({"thd", "dropout", "float mask", *FORWARD_ONLY}, without="triton"))
def test_opcheck(case: str) -> None:
    """The schema, the autograd registration, and the fake kernels' shapes and strides are right for symbolic sizes."""
    given = arguments(case)
    torch.library.opcheck(FORWARD, given)
    if case in FORWARD_ONLY:
        return
    given = [x.detach() if isinstance(x, Tensor) else x for x in given]
    o, lse = FORWARD(*given)
    grads = [f"d{name}" for name, x in leaves(case).items() if x.requires_grad]
    dlse = torch.ones_like(lse)
    torch.library.opcheck(BACKWARD, [*of_backward(given), normal(*o.shape).to(o.dtype), o, lse, dlse, given[-1], grads])


def test_opcheck_without_the_forwards_answers() -> None:
    given = [x.detach() if isinstance(x, Tensor) else x for x in arguments("plain")]
    torch.library.opcheck(
        BACKWARD, [*of_backward(given), normal(2, 4, 5, 8), None, None, None, given[-1], ["dv", "dq"]]
    )


def test_options_of_numpy_travel() -> None:
    t = inputs()
    plain = attention(**t, window=(1, 2), scale=0.25)
    assert torch.equal(attention(**t, window=[np.int32(1), np.int64(2)], scale=np.float64(0.25)), plain)  # type: ignore[list-item]


def loss_and_gradients(call: Callable[..., Any], tensors: dict[str, Tensor]) -> list[Tensor]:
    wanted = [x for x in tensors.values() if x.requires_grad]
    answers = call(tensors)
    if not wanted:
        return list(answers)
    return [*answers, *torch.autograd.grad([x.double().cos().sum() for x in answers], wanted)]


@pytest.mark.parametrize("case", cases({"thd", "dropout", "float mask", "triton"}))
def test_compiled_whole_it_gives_the_same_bits(case: str) -> None:
    """Compiled o, lse and gradients have the bits of eager ones; aot_eager runs the graph without generated code."""
    torch.compiler.reset()

    def call(tensors: dict[str, Tensor]) -> Any:
        return attention(**tensors, **CASES[case][1], return_lse=True)

    tensors = leaves(case)
    expected = loss_and_gradients(call, tensors)
    actual = loss_and_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_one_compiled_program_takes_any_length() -> None:
    torch.compiler.reset()
    programs = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        programs.append(graph)
        return graph

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counting)
    for lengths in ((5, 7), (9, 12), (33, 70)):
        tensors = [x.detach() for x in inputs(2, 4, *lengths, 8).values()]
        assert torch.equal(compiled(*tensors), call(*tensors))
    assert len(programs) == 1


def test_an_exported_program_holds_one_node_for_attention() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attention(q, k, v, causal=True, softcap=3.0)

    tensors = tuple(inputs().values())
    program = torch.export.export(Model(), tensors)
    nodes = [node for node in program.graph.nodes if node.target == FORWARD]
    assert [node.args[-1] for node in nodes] == ["{'causal': True, 'softcap': 3.0}"]
    assert torch.equal(program.module()(*tensors), Model()(*tensors))


def test_attention_backward_compiles_whole() -> None:
    torch.compiler.reset()
    t = qkv(2, 4, 5, 7, 8, kv_heads=2)
    compiled = torch.compile(attention_backward, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(**t, causal=True), attention_backward(**t, causal=True), strict=True):
        assert torch.equal(a, b)


def test_a_seed_is_drawn_by_each_run_of_a_compiled_program() -> None:
    torch.compiler.reset()
    t = inputs()
    compiled = torch.compile(lambda: attention(**t, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(attention(**t, dropout_p=0.5), first)


def test_checkpointing_runs_the_forward_again_with_the_seed_that_it_drew() -> None:
    t = leaves("plain")

    def gradient(around: Callable[..., Any]) -> Tensor:
        torch.manual_seed(3)
        o = around(lambda: attention(**t, dropout_p=0.5))
        return torch.autograd.grad(o.square().sum(), t["q"])[0]

    again = gradient(lambda call: checkpoint(call, use_reentrant=False))
    assert torch.equal(again, gradient(lambda call: call()))


def test_without_autograd_or_without_data() -> None:
    t = inputs()
    expected = attention(**t, causal=True)
    with torch.inference_mode():
        assert torch.equal(attention(**t, causal=True), expected)
    o, lse = attention(**{name: x.to("meta") for name, x in t.items()}, return_lse=True)
    assert (o.shape, lse.shape, o.device.type) == ((2, 4, 5, 8), (2, 4, 5), "meta")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++: install g++ (apt-get install g++)")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor() -> None:
    """Answers are close, not equal: inductor's code for the operations around attention rounds differently."""
    torch.compiler.reset()
    tensors = leaves("sinks")

    def call(tensors: dict[str, Tensor]) -> Any:
        q = tensors["q"].sin()
        return (attention(**tensors | {"q": q}, causal=True).square(),)

    expected = loss_and_gradients(call, tensors)
    actual = loss_and_gradients(torch.compile(call, fullgraph=True), tensors)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_wrong_by_its_sizes_is_refused_when_it_is_traced() -> None:
    t = inputs() | {"attn_mask": normal(3, 3)}
    with pytest.raises(RuntimeError, match="attn_mask: shape"):  # Dynamo's error quotes that of `attention`
        torch.compile(lambda: attention(**t), fullgraph=True, backend="aot_eager")()


def test_what_depends_on_values_is_refused_when_it_runs() -> None:
    t = inputs() | {"kv_lengths": index(3, 8)}
    with pytest.raises(ProblemError, match="kv_lengths: must be between 0 and 7"):
        torch.compile(lambda: attention(**t), fullgraph=True, backend="aot_eager")()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"causal": 1}, "causal: must be a bool"),
        ({"window": 3}, "window: must be two integers"),
        ({"dropout_p": 0.1, "dropout_seed": -4}, "dropout_seed: must be an integer"),
        ({"scale": float("nan")}, "scale: must be a number"),
    ],
)
def test_options_are_checked_before_the_dispatcher_coerces_them(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        attention(**inputs(), **wrong)


def test_a_gradient_with_dropout_and_no_seed_is_refused() -> None:
    with pytest.raises(ProblemError, match="dropout_seed: is required: a gradient with dropout needs the forward's"):
        attention_backward(**qkv(2, 4, 5, 7, 8), dropout_p=0.5)
