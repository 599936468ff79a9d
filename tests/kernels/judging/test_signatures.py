"""The judge recognises signatures and layouts of flash-attn, SDPA, FlashInfer, this library and plain functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashpoint_kernels
from flashpoint_contract.judging import Report
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.child import described
from flashpoint_kernels.judging.signatures import UnusableError, call_of, signature_of
from flashpoint_kernels.judging.values import draw

SIZES = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 9, "kv_len": 14, "head_dim": 16}


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flashpoint_kernels.attention(q, k, v, backend="tiled", **options)


# flash-attn's functions, as of its version 2.8


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    assert dropout_p == 0
    actual = attention(
        q, k, v, layout="bshd", scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*actual, None) if return_attn_probs else actual


def flash_attn_qkvpacked_func(qkv: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    return flash_attn_func(*qkv.unbind(2), softmax_scale=softmax_scale, causal=causal)  # type: ignore[no-any-return]


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    return flash_attn_func(q, *kv.unbind(2), softmax_scale=softmax_scale, causal=causal)  # type: ignore[no-any-return]


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(cu_seqlens_k.diff().max())
    return attention(  # type: ignore[no-any-return]
        q, k, v, layout="thd", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, scale=softmax_scale, causal=causal,
        window=window_size,
    )  # fmt: skip


# Signatures of SDPA, FlashInfer, this library, and plain functions


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, kv_layout: str = "NHD", sm_scale: float | None = None,
    window_left: int = -1, logits_soft_cap: float | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    o, lse = attention(
        q[None], k[None], v[None], layout="bshd", causal=causal, scale=sm_scale, window=(window_left, -1),
        softcap=logits_soft_cap or 0.0, return_lse=True,
    )  # fmt: skip
    return (o[0], lse[0].mT * 1.4426950408889634) if return_lse else o[0]


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def by_name(*, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return attention(q, k, v, causal=is_causal, causal_alignment="top_left")  # type: ignore[no-any-return]


def sequence_first(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Take inputs (length, batch, heads, D), as Megatron does."""
    in_bhsd = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
    return attention(*in_bhsd, causal=causal).permute(2, 0, 1, 3)  # type: ignore[no-any-return]


def without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take inputs (batch, length, D)."""
    assert q.ndim == 3
    return attention(q[:, None], k[:, None], v[:, None])[:, 0]  # type: ignore[no-any-return]


def one_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take inputs (length, D)."""
    if q.ndim != 2:
        raise ValueError("q must be a matrix")
    return attention(q[None, None], k[None, None], v[None, None])[0, 0]  # type: ignore[no-any-return]


class Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
        return attention(q, k, v, attn_mask=mask)


module = Module()
torchs_own = torch.nn.functional.scaled_dot_product_attention

FUNCTIONS: dict[str, tuple[Any, str, str, set[str]]] = {
    "flash_attn_func": (
        flash_attn_func, "flash-attn", "bshd", {"scale", "causal", "window", "softcap", "alibi_slopes"}
    ),
    "flash_attn_qkvpacked_func": (flash_attn_qkvpacked_func, "flash-attn", "bshd", {"scale", "causal"}),
    "flash_attn_kvpacked_func": (flash_attn_kvpacked_func, "flash-attn", "bshd", {"scale", "causal"}),
    "flash_attn_varlen_func": (flash_attn_varlen_func, "flash-attn", "thd", {"scale", "causal", "window"}),
    "single_prefill_with_kv_cache": (
        single_prefill_with_kv_cache, "flashinfer", "shd", {"scale", "causal", "window", "softcap"}
    ),
    "sdpa": (sdpa, "sdpa", "bhsd", {"causal", "scale", "attn_mask"}),
    "torchs own": (torchs_own, "sdpa", "bhsd", {"causal", "scale", "attn_mask"}),
    "ours": (
        flashpoint_kernels.attention, "flashpoint", "bhsd",
        {"causal", "scale", "window", "softcap", "attn_mask", "alibi_slopes", "sinks", "kv_lengths"},
    ),
    "by_name": (by_name, "sdpa", "bhsd", {"causal"}),
    "sequence_first": (sequence_first, "plain", "sbhd", {"causal"}),
    "without_heads": (without_heads, "plain", "hsd", set()),
    "one_matrix": (one_matrix, "plain", "sd", set()),
    "module": (module, "plain", "bhsd", {"attn_mask"}),
}  # fmt: skip


def judged(function: Any, **only: Any) -> Report:
    return flashpoint_kernels.judge(
        function, quick=True, only={"values": "normal", "seed": 3, **only}, dtype="float32", device="cpu"
    )


def sizes_of(name: str) -> dict[str, int]:
    """Return the sizes of a case that the function with this name accepts."""
    if name in ("without_heads", "one_matrix"):
        heads = 3 if name == "without_heads" else 1  # without_heads reads 3 heads as a batch of 3
        return SIZES | {"batch": 1, "q_heads": heads, "kv_heads": heads, "value_dim": 16}
    if name == "flash_attn_qkvpacked_func":
        return SIZES | {"kv_heads": 4, "kv_len": 9, "value_dim": 16}
    return SIZES | {"value_dim": 16} | ({"batch": 1} if name.startswith("single") else {})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_and_layouts_are_recognised(name: str) -> None:
    function, style, layout, options = FUNCTIONS[name]
    signature = signature_of(described(function))
    assert (signature.style, signature.options >= options) == (style, True), signature
    report = judged(function, **sizes_of(name))
    assert report.verdict == "right", report.lines()
    assert report.layout == layout
    assert {"o", "dq", "dk", "dv"} <= set(report.outputs)


OPTIONS = {
    "causal": {"causal": True}, "scale": {"scale": 0.3}, "window": {"window": [3, 2]}, "softcap": {"softcap": 2.0},
    "attn_mask": {"mask": "float"}, "alibi_slopes": {"extras": ["alibi_slopes"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, o) for name in ("flash_attn_func", "sdpa", "ours") for o in OPTIONS if o in FUNCTIONS[name][3]],
)
def test_options_arrive_by_the_functions_own_names(name: str, option: str) -> None:
    report = judged(FUNCTIONS[name][0], **sizes_of(name), **OPTIONS[option])
    assert report.verdict == "right", report.lines()
    assert report.cases == 1


def test_a_case_that_the_signature_cannot_express_is_not_run() -> None:
    for function, reason in ((without_heads, "no batch dimension"), (one_matrix, "no batch dimension")):
        report = judged(function, **SIZES, value_dim=16)
        assert report.verdict == "not judged"
        assert [part.reason for part in report.not_run] == [f"it has {reason}"]
    report = judged(one_matrix, **(SIZES | {"batch": 1, "value_dim": 16}))
    assert [part.reason for part in report.not_run] == ["it has no dimension of heads"]


def test_lse_is_judged_in_the_form_and_base_that_the_function_has() -> None:
    assert "lse" in judged(flash_attn_func, **sizes_of("flash_attn_func")).outputs
    report = judged(single_prefill_with_kv_cache, **sizes_of("single"))
    assert (report.verdict, "lse" in report.outputs) == ("right", True)


def test_causal_is_aligned_as_the_signature_says() -> None:
    """SDPA's is_causal is aligned top left, other signatures bottom right; causal_alignment overrides both."""
    sizes = SIZES | {"value_dim": 16, "causal": True}
    assert judged(sdpa, **sizes).verdict == "right"
    only = {"values": "normal", "seed": 3, **sizes}
    other = flashpoint_kernels.judge(sdpa, only=only, dtype="float32", causal_alignment="bottom_right")
    assert other.verdict == "wrong"
    assert other.causes[0].code == "causal-alignment"


def needs_more(q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> Tensor:
    raise NotImplementedError


def numbered_window(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    raise NotImplementedError


def half_by_name(q: Tensor, *, k: Tensor, v: Tensor) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "message"),
    [(needs_more, "needs a parameter 'rope'"), (half_by_name, "some of q, k and v by name alone"),
     (lambda q, k: q, "has 2 parameters")],
)  # fmt: skip
def test_a_signature_that_cannot_be_called_is_refused(function: Any, message: str) -> None:
    with pytest.raises(UnusableError, match=message):
        signature_of(described(function))


def test_one_number_for_a_window_is_ambiguous_and_not_used() -> None:
    signature = signature_of(described(numbered_window))
    assert "window" not in signature.options
    assert signature.ambiguous == ("window: one number may count keys with or without the query's own",)


def test_a_call_has_the_functions_own_arguments() -> None:
    case = Case(q_heads=2, kv_heads=1, q_len=3, kv_len=4, batch=2, causal=True, scale=0.5, window=(2, 1))
    signature = signature_of(described(flash_attn_func))
    call = call_of(signature, case, draw(case))
    assert call.request["args"] == [{"tensor": "q"}, {"tensor": "k"}, {"tensor": "v"}]
    assert call.request["kwargs"] == {
        "softmax_scale": 0.5, "causal": True, "window_size": [2, 1], "return_attn_probs": True,
    }  # fmt: skip
    assert call.tensors["q"].shape == (2, 3, 2, 16)
    described_call = call_of(signature_of(described(by_name)), Case(causal=True), draw(Case()))
    assert described_call.request["kwargs"] == {
        "q": {"tensor": "q"}, "k": {"tensor": "k"}, "v": {"tensor": "v"}, "is_causal": True,
    }  # fmt: skip


# Layouts that the judge must guess


def scaled_by_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take the scale from axis 2 of k: Sk in layout bhsd, which is wrong, and D in layout hsd, which is right."""
    s = q.float() @ k.float().mT * k.shape[2] ** -0.5
    return (s.softmax(-1) @ v.float()).to(q.dtype)


def over_axis_1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over axis 1, which is right in layout bshd; in bhsd this axis has the heads."""
    return attention(q, k, v, layout="bshd")  # type: ignore[no-any-return]


def three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take only inputs (length, heads, D)."""
    _, _, dim = q.shape
    s = torch.einsum("shd,thd->hst", q, k) * dim**-0.5
    return torch.einsum("hst,thd->shd", s.softmax(-1), v)


def needs_whole_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take inputs (batch, length, heads, D) whose lengths are multiples of 64, the size of a tile."""
    if q.shape[1] % 64:
        raise ValueError("the length must be a multiple of 64")
    return attention(q, k, v, layout="bshd")  # type: ignore[no-any-return]


def test_a_wrong_axis_is_not_right_in_a_layout_of_fewer_axes() -> None:
    report = judged(scaled_by_keys, **SIZES, value_dim=16)
    assert (report.verdict, report.layout, report.ok) == ("wrong", "bhsd", False)
    assert report.lines()[-1].endswith("; judged as bhsd (guessed); as hsd it is right: --layout hsd")
    only = {"values": "normal", "seed": 3, "q_heads": 3, "kv_heads": 3, "q_len": 9, "kv_len": 9}
    named = flashpoint_kernels.judge(scaled_by_keys, quick=True, only=only, dtype="float32", layout="hsd")
    assert (named.verdict, named.lines()[-1]) == ("right", "PASS: right: every error is within its bound")


def test_a_guessed_layout_is_said_where_another_runs_and_is_wrong() -> None:
    report = judged(over_axis_1, **SIZES, value_dim=16)
    assert (report.verdict, report.layout, report.ok) == ("right", "bshd", True)
    assert report.lines()[-1] == (
        "PASS: right: every error is within its bound; right as bshd (guessed); as bhsd it is wrong: --layout bhsd"
    )
    known = judged(flash_attn_func, **sizes_of("flash_attn_func"))
    assert known.lines()[-1] == "PASS: right: every error is within its bound"


def test_a_layout_is_found_of_functions_that_refuse_others() -> None:
    sizes = {"batch": 1, "q_heads": 3, "kv_heads": 3, "q_len": 64, "kv_len": 64, "head_dim": 16, "value_dim": 16}
    for function, layout in ((three_axes, "shd"), (needs_whole_tiles, "bshd")):
        report = judged(function, **sizes)
        assert (report.verdict, report.layout) == ("right", layout), report.lines()


# Options that the signature names


def raises_if_causal(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if causal:
        raise ValueError("no such mask")
    return attention(q, k, v)  # type: ignore[no-any-return]


def lacks_causal(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if causal:
        raise NotImplementedError("causal comes later")
    return attention(q, k, v)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_option_that_always_raises_is_named_in_the_verdict() -> None:
    last = {}
    for function in (raises_if_causal, lacks_causal):
        report = flashpoint_kernels.judge(function, quick=True, dtype="float32", only={"head_dim": 16})
        assert (report.verdict, report.ok) == ("right", True), report.lines()
        assert "unsupported: causal" in "\n".join(report.lines())
        last[function] = report.lines()[-1]
    assert last[raises_if_causal] == (
        "PASS: right: every error is within its bound; causal, which the signature names, raised in every case: "
        "ValueError: no such mask"
    )
    assert last[lacks_causal] == "PASS: right: every error is within its bound"
