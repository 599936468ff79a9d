"""One call of each public function that takes tensors, forward and backward, for the test of ambient states.

A call's inputs are made in the plain state. Its function returns answers by name; the names of gradients begin with
"d", and are missing where nothing is recorded for autograd.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashpoint_kernels as kernels
from flashpoint_kernels import Options, Problem, flash_attn, modules, nano
from flashpoint_kernels.flash_attn import bert_padding
from flashpoint_kernels.flash_attn.layers import rotary
from flashpoint_kernels.judging import values
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.problems.memory import extent

Tensors = dict[str, Tensor]
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@dataclass(frozen=True)
class Call:
    """A function of tensors by name. `leaves` require gradients; autocast converts the inputs `casts`.

    `of_torch`: its answers under autocast are those of torch's own modules in it.
    """

    inputs: Callable[[], Tensors]
    run: Callable[[Tensors, tuple[str, ...]], Mapping[str, Tensor]]  # the second argument: inputs to convert first
    leaves: tuple[str, ...] = ()
    casts: tuple[str, ...] = ()
    of_torch: bool = False


CALLS: dict[str, Call] = {}


def normal(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64, device="cpu").to(dtype)


def integers(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def qkv(
    layout: str = "bhsd", q_len: int = 40, kv_len: int = 70, dtype: torch.dtype = F32, scale: float = 1.0, dim: int = 16
) -> Callable[[], Tensors]:
    def made() -> Tensors:
        shapes = {
            "q": (2, 4, q_len, dim),
            "k": (2, 2, kv_len, dim),
            "v": (2, 2, kv_len, dim),
            "do": (2, 4, q_len, dim),
        }
        found = {name: normal(*shape, seed=n, dtype=dtype) * scale for n, (name, shape) in enumerate(shapes.items())}
        if layout == "bhsd":
            return found
        turned = {name: t.transpose(1, 2).contiguous() for name, t in found.items()}
        return turned if layout == "bshd" else {name: t.flatten(0, 1) for name, t in turned.items()}

    return made


def own(t: Tensor) -> Tensor:
    """Return a copy that a function may write into; a tensor whose storage was freed or shrunk cannot be copied."""
    return t.clone() if t._is_zerotensor() or t.untyped_storage().nbytes() >= extent(t) else t


def with_(made: Callable[[], Tensors], **more: Callable[[], Tensor]) -> Callable[[], Tensors]:
    return lambda: made() | {name: make() for name, make in more.items()}


def converted(t: Tensors, casts: tuple[str, ...]) -> Tensors:
    return {n: x.to(BF16) if n in casts and x.dtype == F32 else x for n, x in t.items()}


def solved(function: Callable[[Tensors], Any], leaves: tuple[str, ...]) -> Any:
    """Return a function that adds the gradients of the first answer, and of the sum of a second one, to the answers."""

    def run(t: Tensors, casts: tuple[str, ...]) -> Mapping[str, Tensor]:
        given = converted({n: x for n, x in t.items() if n != "do"}, casts)
        answers = function(given)
        answers = answers if isinstance(answers, tuple) else (answers,)
        found = {f"o{n}": o for n, o in enumerate(answers) if isinstance(o, Tensor)}
        ends = [(o, t["do"].to(o.dtype) if n == "o0" else None) for n, o in found.items() if o.requires_grad]
        if not ends:
            return found
        outputs, weights = zip(*[(o, torch.ones_like(o) if w is None else w) for o, w in ends], strict=True)
        gradients = torch.autograd.grad(outputs, [t[n] for n in leaves], weights)
        return found | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}

    return run


def differentiable(
    name: str, inputs: Callable[[], Tensors], function: Callable[[Tensors], Any],
    leaves: tuple[str, ...] = ("q", "k", "v"), casts: tuple[str, ...] = ("q", "k", "v"),
) -> None:  # fmt: skip
    CALLS[name] = Call(inputs, solved(function, leaves), leaves, casts)


def alone(
    name: str, inputs: Callable[[], Tensors], function: Callable[[Tensors], Any], casts: tuple[str, ...] = ()
) -> None:
    """Register a call without gradients."""

    def run(t: Tensors, casts: tuple[str, ...]) -> Mapping[str, Tensor]:
        answers = function(converted(t, casts))
        if isinstance(answers, Mapping):
            return answers
        answers = answers if isinstance(answers, tuple) else (answers,)
        return {f"o{n}": o for n, o in enumerate(answers) if isinstance(o, Tensor)}

    CALLS[name] = Call(inputs, run, (), casts)


def attention(**options: Any) -> Callable[[Tensors], Any]:
    return lambda t: kernels.attention(**t, **options)


mask = lambda: normal(40, 70, seed=9)  # noqa: E731
seen = lambda: normal(40, 70, seed=9) > -1  # noqa: E731
slopes = lambda: torch.exp2(-torch.arange(1, 5, dtype=F32, device="cpu"))  # noqa: E731
sinks = lambda: normal(4, seed=8)  # noqa: E731
blocks = lambda: normal(2, 4, 3, 5, seed=7) > -0.5  # noqa: E731

differentiable("attention", qkv(), attention(return_lse=True))
differentiable("attention causal", qkv(dtype=BF16), attention(causal=True, layout="bhsd"))
differentiable("attention bshd", qkv("bshd"), attention(layout="bshd", return_lse=True, softcap=5.0))
differentiable("attention float64", qkv(dtype=F64), attention(return_lse=True))
differentiable(
    "attention thd",
    with_(qkv("thd"), cu_seqlens_q=lambda: integers(0, 30, 80), cu_seqlens_k=lambda: integers(0, 100, 140)),
    attention(layout="thd", return_lse=True),
)
differentiable("attention mask", with_(qkv(), attn_mask=mask), attention(return_lse=True), ("q", "k", "v", "attn_mask"))
differentiable(
    "attention mask float64", with_(qkv(), attn_mask=lambda: mask().to(F64)), attention(), ("q", "attn_mask")
)
differentiable("attention bool mask", with_(qkv(), attn_mask=seen), attention(return_lse=True))
differentiable(
    "attention extras",
    with_(qkv(), alibi_slopes=slopes, sinks=sinks, block_mask=blocks),
    attention(return_lse=True, block_size=(16, 16), window=(30, 5)),
    ("q", "k", "v", "sinks"),
)
differentiable("attention lengths", qkv(), attention(return_lse=True, kv_lengths=[3, 70], q_lengths=[40, 7], offset=2))
differentiable("attention dropout", qkv(), attention(dropout_p=0.25, dropout_seed=5, alibi_slopes=None))
differentiable("attention tiled", qkv(), attention(backend="tiled", return_lse=True, causal=True, softcap=9.0))
differentiable(
    "attention tiled mask",
    with_(qkv(), attn_mask=mask, alibi_slopes=slopes),
    attention(backend="tiled", return_lse=True, dropout_p=0.25, dropout_seed=5),
    ("q", "k", "v", "attn_mask"),
)
differentiable(
    "attention tiled blocks", with_(qkv(), block_mask=blocks), attention(backend="tiled", block_size=(16, 16))
)
differentiable("attention reference", qkv(), attention(backend="reference", return_lse=True, window=(20, 3)))
large = qkv(q_len=300, kv_len=300, dim=64)  # torch has other code for large products
differentiable("attention tiled large", large, attention(backend="tiled", return_lse=True))
differentiable("attention reference large", large, attention(backend="reference", return_lse=True))
differentiable("attention tiled denormal", qkv(scale=1e-39), attention(backend="tiled", return_lse=True))
differentiable("attention reference denormal", qkv(scale=1e-39), attention(backend="reference", return_lse=True))
differentiable("attention long", qkv(q_len=1, kv_len=6000), attention(return_lse=True, softcap=20.0))
differentiable("attention tiny", qkv(scale=1e-20), attention(scale=1e38, return_lse=True))
differentiable("attention denormal", qkv(scale=1e-39), attention(return_lse=True))
alone(
    "attention pages",
    lambda: {
        **{n: t for n, t in qkv()().items() if n == "q"},
        **{n: normal(9, 2, 16, 16, seed=ord(n)) for n in "kv"},
        "block_table": integers(0, 1, 2, 3, 4, 5).view(2, 3), "kv_lengths": integers(40, 48),
    },
    attention(return_lse=True),
    ("q", "k", "v"),
)  # fmt: skip
alone(
    "attention 8 bits",
    lambda: {"q": qkv()()["q"]} | {n: qkv()()[n].mul(30).to(torch.int8) for n in "kv"},
    lambda t: kernels.attention(**t, k_scale=0.03, v_scale=0.5, return_lse=True),
    ("q",),
)  # fmt: skip


def gradients(t: Tensors, **options: Any) -> tuple[Tensor, ...]:
    return kernels.attention_backward(t.pop("do"), **t, **options)


alone("attention_backward", qkv(), lambda t: gradients(dict(t), causal=True))
alone(
    "attention_backward extras",
    with_(qkv(), attn_mask=lambda: mask()[None, None], sinks=sinks),
    lambda t: gradients(dict(t), grads=("dq", "dk", "dv", "dattn_mask", "dsinks")),
)
alone("attention_backward long", qkv(q_len=600, kv_len=300), lambda t: gradients(dict(t), softcap=3.0))


def run(t: Tensors) -> Mapping[str, Tensor]:
    problem = Problem.create(t, Options(causal=True), "backward")
    kernels.run([problem], kernels.available_backends("cpu")[0])
    return problem.outputs


alone("run", qkv(), run)


def queries_and_keys() -> Tensors:
    return {name: t for name, t in qkv()().items() if name in ("q", "k")}


alone("key_weights", queries_and_keys, lambda t: kernels.key_weights(**t, causal=True), ("q", "k"))
alone("key_weights tiled", queries_and_keys, lambda t: kernels.key_weights(**t, backend="tiled"), ("q", "k"))
alone("attention_weights", queries_and_keys, lambda t: kernels.attention_weights(**t, rows=[0, 39]), ("q", "k"))

sdpa = functools.partial(kernels.scaled_dot_product_attention, enable_gqa=True)
differentiable("scaled_dot_product_attention", qkv(), lambda t: sdpa(t["q"], t["k"], t["v"]))
differentiable(
    "scaled_dot_product_attention mask", with_(qkv(), m=mask), lambda t: sdpa(t["q"], t["k"], t["v"], attn_mask=t["m"]),
    ("q", "k", "v", "m"),
)  # fmt: skip


def flex(t: Tensors) -> Any:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + t["bias"][h] * (i - j) / 8

    return kernels.flex_attention(t["q"], t["k"], t["v"], score_mod, enable_gqa=True, return_lse=True)


differentiable("flex_attention", with_(qkv(), bias=lambda: normal(4, seed=6)), flex, ("q", "k", "v", "bias"))
differentiable(
    "flex_attention plain", qkv(q_len=10), lambda t: kernels.flex_attention(t["q"], t["k"], t["v"], enable_gqa=True)
)
differentiable("flex_attention large", large, lambda t: kernels.flex_attention(t["q"], t["k"], t["v"], enable_gqa=True))
differentiable(
    "flex_attention denormal",
    qkv(scale=1e-39),
    lambda t: kernels.flex_attention(t["q"], t["k"], t["v"], enable_gqa=True),
)
differentiable(
    "merge",
    lambda: (
        {"a": normal(2, 4, 5, 8, seed=1), "b": normal(2, 4, 5, 8, seed=2), "do": normal(2, 4, 5, 8, seed=5)}
        | {"x": normal(2, 4, 5, seed=3), "y": normal(2, 4, 5, seed=4)}
    ),
    lambda t: kernels.merge([t["a"], t["b"]], [t["x"], t["y"]]),
    ("a", "b", "x", "y"),
    (),
)
alone("quantize", lambda: {"x": normal(3, 5, 16, seed=1)}, lambda t: kernels.quantize(t["x"]))
alone("quantize int8", lambda: {"x": normal(3, 5, 16, seed=1)}, lambda t: kernels.quantize(t["x"], torch.int8))
alone(
    "dequantize",
    lambda: {"x": normal(3, 5, 16, seed=1).mul(20).to(torch.int8)},
    lambda t: kernels.dequantize(t["x"], 0.3),
)
alone(
    "dequantize rows",
    lambda: {"x": normal(3, 5, 16, seed=1).to(torch.float8_e4m3fn), "s": normal(3, 5, seed=2)},
    lambda t: kernels.dequantize(t["x"], t["s"], BF16),
)
alone(
    "create_block_mask",
    lambda: {"x": normal(40, 70, seed=1) > 1},
    lambda t: kernels.create_block_mask(t["x"], block_size=16),
)
alone(
    "create_block_mask rule",
    lambda: {"x": integers(1, 2)},
    lambda t: kernels.create_block_mask(lambda b, h, i, j: i - j < t["x"][b] * 8, 2, 1, 40, 70, block_size=16),
)


# ---- flash_attn ----

bshd = qkv("bshd")
lse = {"return_attn_probs": True}
differentiable(
    "flash_attn_func", bshd, lambda t: flash_attn.flash_attn_func(t["q"], t["k"], t["v"], causal=True, **lse)
)
differentiable(
    "flash_attn_kvpacked_func",
    lambda: {"q": bshd()["q"], "kv": torch.stack([bshd()["k"], bshd()["v"]], 2), "do": bshd()["do"]},
    lambda t: flash_attn.flash_attn_kvpacked_func(t["q"], t["kv"], **lse),
    ("q", "kv"),
    ("q", "kv"),
)
differentiable(
    "flash_attn_qkvpacked_func",
    lambda: {"qkv": normal(2, 20, 3, 4, 16, seed=1), "do": normal(2, 20, 4, 16, seed=2)},
    lambda t: flash_attn.flash_attn_qkvpacked_func(t["qkv"], **lse),
    ("qkv",),
    ("qkv",),
)
edges = {"cu": lambda: integers(0, 30, 60)}  # rows after the last sequence are not read
differentiable(
    "flash_attn_varlen_func",
    with_(qkv("thd", 40, 40), **edges),
    lambda t: flash_attn.flash_attn_varlen_func(t["q"], t["k"], t["v"], t["cu"], t["cu"], 30, 30, causal=True, **lse),
)
differentiable(
    "flash_attn_varlen_kvpacked_func",
    lambda: (
        {n: qkv("thd", 40, 40)()[n] for n in ("q", "do")} | {"kv": normal(80, 2, 2, 16, seed=3), "cu": edges["cu"]()}
    ),
    lambda t: flash_attn.flash_attn_varlen_kvpacked_func(t["q"], t["kv"], t["cu"], t["cu"], 30, 30, **lse),
    ("q", "kv"),
    ("q", "kv"),
)
differentiable(
    "flash_attn_varlen_qkvpacked_func",
    lambda: {"qkv": normal(70, 3, 4, 16, seed=3), "do": normal(70, 4, 16, seed=2), "cu": edges["cu"]()},
    lambda t: flash_attn.flash_attn_varlen_qkvpacked_func(t["qkv"], t["cu"], 30, **lse),
    ("qkv",),
    ("qkv",),
)


def cached(t: Tensors) -> Mapping[str, Tensor]:
    k, v = own(t["k"]), own(t["v"])
    o, lse = flash_attn.flash_attn_with_kvcache(
        t["q"], k, v, t["new_k"], t["new_v"], t["cos"], t["sin"], t["lengths"], cache_leftpad=t["left"], causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    return {"o": o, "lse": lse, "k": k, "v": v}


alone(
    "flash_attn_with_kvcache",
    lambda: {
        **{n: normal(2, 3, 4, 16, seed=1, dtype=BF16) for n in ("q",)},
        **{n: normal(2, 50, 2, 16, seed=ord(n), dtype=BF16) for n in "kv"},
        **{f"new_{n}": normal(2, 3, 2, 16, seed=ord(n) + 2, dtype=BF16) for n in "kv"},
        "cos": normal(60, 8, seed=6), "sin": normal(60, 8, seed=7), "lengths": integers(10, 40), "left": integers(0, 4),
    },
    cached,
)  # fmt: skip
alone(
    "unpad_input",
    lambda: {"x": normal(2, 5, 3, seed=1), "m": normal(2, 5, seed=2) > -1},
    lambda t: bert_padding.unpad_input(t["x"], t["m"]),
)
alone(
    "unpad_input_for_concatenated_sequences",
    lambda: {"x": normal(2, 6, 3, seed=1), "n": integers(2, 3, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0).view(2, 6)},
    lambda t: bert_padding.unpad_input_for_concatenated_sequences(t["x"], t["n"]),
)
alone(
    "index_first_axis",
    lambda: {"x": normal(6, 3, seed=1), "at": integers(1, 4, dtype=torch.int64)},
    lambda t: (
        *bert_padding.index_first_axis_residual(t["x"], t["at"]),
        bert_padding.index_first_axis(t["x"], t["at"]),
    ),
)
differentiable(
    "pad_input",
    lambda: {"x": normal(4, 3, seed=1), "at": integers(0, 2, 3, 5, dtype=torch.int64), "do": normal(2, 3, 3, seed=2)},
    lambda t: bert_padding.pad_input(t["x"], t["at"], 2, 3),
    ("x",),
    (),
)
angles = {"cos": lambda: normal(30, 8, seed=6), "sin": lambda: normal(30, 8, seed=7)}
differentiable(
    "apply_rotary_emb",
    with_(
        lambda: {"x": normal(2, 9, 3, 16, seed=1), "do": normal(2, 9, 3, 16, seed=2)},
        at=lambda: integers(3, 20),
        **angles,
    ),
    lambda t: rotary.apply_rotary_emb(t["x"], t["cos"], t["sin"], True, seqlen_offsets=t["at"]),
    ("x", "cos"),
    (),
)
alone(
    "apply_rotary_emb_qkv_",
    with_(lambda: {"x": normal(2, 9, 3, 3, 16, seed=1)}, **angles),
    lambda t: rotary.apply_rotary_emb_qkv_(own(t["x"]), t["cos"], t["sin"], seqlen_offsets=2),
)
alone(
    "apply_rotary_emb_kv_",
    with_(lambda: {"x": normal(2, 9, 2, 3, 16, seed=1)}, **angles),
    lambda t: rotary.apply_rotary_emb_kv_(own(t["x"]), t["cos"], t["sin"]),
)


@functools.cache
def embedding() -> Any:
    return rotary.RotaryEmbedding(16, scale_base=8.0, device="cpu")


alone("RotaryEmbedding", lambda: {"x": normal(2, 9, 3, 3, 16, seed=1)}, lambda t: embedding()(own(t["x"])))


@functools.cache
def block() -> Any:
    with torch.device("cpu"):
        made = modules.Block(32, 4, 2).to(F32).requires_grad_(False)
    for n, weight in enumerate(made.parameters()):
        weight.copy_(normal(*weight.shape, seed=n) / 4)
    return made


differentiable(
    "Block", lambda: {"x": normal(2, 9, 32, seed=1), "do": normal(2, 9, 32, seed=2)}, lambda t: block()(t["x"], [9, 4]),
    ("x",), (),
)  # fmt: skip
CALLS["Block"] = dataclasses.replace(CALLS["Block"], of_torch=True)


alone(
    "nano_attention",
    lambda: {n: normal(1, 2, 20, 16, seed=ord(n)) for n in "qkv"},
    lambda t: nano.nano_attention(t["q"], t["k"], t["v"], True),
)


# ---- judges ----


def verified(t: Tensors) -> Mapping[str, Tensor]:
    found = kernels.verify(t, Options(causal=True, softcap=4.0))
    numbers = [x for e in found.tensors for x in (e.max_abs, e.rms, e.bound, e.torch.max_abs)] + [float(found.ok)]
    return {"errors": torch.tensor(numbers, dtype=F64, device="cpu")}


alone("verify", qkv(q_len=8, kv_len=12), verified)
alone("verify bfloat16", qkv(q_len=8, kv_len=12, dtype=BF16), verified)


def drawn(t: Tensors) -> Mapping[str, Tensor]:
    """Return the judge's values of each kind."""
    case = Case(batch=2, q_heads=2, kv_heads=1, q_len=20, kv_len=30, mask="float", extras=("alibi_slopes", "sinks"))
    found = {}
    for kind in values.KINDS:
        tensors = values.draw(dataclasses.replace(case, values=kind))
        found |= {f"{kind}-{name}": x for name, x in tensors.items()}
    return found


alone("judge's values", dict, drawn)
