"""Describe failures whose cause is not known: by the cases that fail, and by the positions of wrong elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashpoint_contract.judging import Cause
from flashpoint_kernels.judging.cases import OUTPUTS, Case
from flashpoint_kernels.judging.exact import places
from flashpoint_kernels.judging.trial import Outcome

_Feature = tuple[Callable[[Case], bool], str]
_WITHOUT_LSE = "lse is not requested"
_OF_VALUES: tuple[_Feature, ...] = (
    (lambda c: c.values.startswith("low"), "all scores are below -5e4"),
    (lambda c: c.values.startswith(("high", "neg", "low")), "all scores are far from 0"),
    (lambda c: c.values.startswith("high"), "scores are above 88"),
    (lambda c: c.values.startswith("gap"), "scores are 12 to 80 below the largest"),
    (lambda c: c.values.startswith(("rising", "lastmax")), "the maximum rises from tile to tile"),
    (lambda c: c.values.startswith(("massive", "offset", "flat")), "values are large or have one sign"),
    (lambda c: c.values == "flat", "many numbers of one sign are summed"),
    (lambda c: c.values in ("massive", "low", "neg", "high", "sharp"), "scores are large"),
    (lambda c: c.values == "offset", "v and do have a large constant part"),
    (lambda c: c.values in ("ties", "dup"), "keys are equal"),
    (lambda c: c.values == "unseen", "hidden keys are large"),
)  # fmt: skip
_OF_CALLS: tuple[_Feature, ...] = (
    (lambda c: c.window[0] >= 0, "a window has a left side"),
    (lambda c: c.window[1] >= 0, "a window has a right side"),
    (lambda c: min(c.window) >= 0, "a window has two sides"),
    (lambda c: c.q_len == 1, "there is one query"),
    (lambda c: "-keys" in c.mask, "attn_mask is (B, 1, 1, Sk)"),
    (lambda c: bool(c.mask) and ("-heads" in c.mask or c.batch == 1), "attn_mask has size 1 for sequences"),
    (lambda c: "-one" in c.mask, "attn_mask is (B, 1, Sq, Sk)"),
    (lambda c: "-plane" in c.mask, "attn_mask is (Sq, Sk)"),
    (lambda c: "-rows" in c.mask, "attn_mask is (B, Hq, Sq, 1)"),
    (lambda c: c.mask.startswith("bool"), "attn_mask is of type bool"),
    (lambda c: c.mask.startswith("float"), "attn_mask is of a floating type"),
    (lambda c: c.bare, _WITHOUT_LSE),
    (lambda c: c.forward, "no gradients are requested"),
    (lambda c: c.kv_len % 1024 == 0, "the number of keys is a multiple of 1,024"),
    (lambda c: c.kv_len % 256 == 0, "the number of keys is a multiple of 256"),
    (lambda c: c.kv_len % 256 == 255, "the number of keys is one less than a multiple of 256"),
    (lambda c: c.kv_len > 8192, "there are more than 8,192 keys"),
    (lambda c: c.kv_len > 256, "there are more than 256 keys"),
    (lambda c: c.q_len > 2047, "there are more than 2,047 queries"),
    (lambda c: c.group > 7, "8 or more query heads share a key head"),
    (lambda c: c.q_heads > 32, "there are more than 32 heads"),
    (lambda c: c.batch * c.q_heads >= 132, "there are at least 132 programs"),
    (lambda c: c.kv_heads > 1, "there are several key heads"),
    (lambda c: c.head_dim > 128, "D is more than 128"),
    (lambda c: 96 < c.head_dim < 128, "D is between 96 and 128"),
    (lambda c: c.head_dim % 16 != 0, "D is no multiple of 16"),
    (lambda c: c.kv_len > 16384, "there are more than 16,384 keys"),
    (lambda c: c.kv_len > 4096, "there are more than 4,096 keys"),
    (lambda c: c.kv_len > 1024, "there are more than 1,024 keys"),
    (lambda c: c.q_len >= 1024, "there are at least 1,024 queries"),
    (lambda c: c.batch * c.q_heads > 65535, "there are more than 65,535 programs"),
    (lambda c: c.q_heads > 64, "there are more than 64 heads"),
    (lambda c: c.group > 1, "query heads share key heads"),
    (lambda c: c.batch > 1, "there are several sequences"),
    (lambda c: c.head_dim & (c.head_dim - 1) != 0, "D is no power of 2"),
    (lambda c: c.head_dim >= 128, "D is 128"),
    (lambda c: c.head_dim != c.value_dim, "Dv is not D"),
    (lambda c: c.kv_len % 64 != 0, "the number of keys is no multiple of 64"),
    (lambda c: c.kv_len % 16 != 0, "the number of keys is no multiple of 16"),
    (lambda c: c.kv_len % 64 == 0, "the number of keys is a multiple of 64"),
    (lambda c: c.q_len % 64 != 0, "the number of queries is no multiple of 64"),
    (lambda c: c.kv_len == 1, "there is one key"),
    (lambda c: c.causal and c.q_len > c.kv_len, "rows see no key"),
    (lambda c: c.causal and c.q_len != c.kv_len, "a causal mask has other lengths of keys and queries"),
    (lambda c: c.causal, "the mask is causal"),
    (lambda c: c.window != (-1, -1), "a window is given"),
    (lambda c: c.softcap > 0, "a softcap is given"),
    (lambda c: c.scale is not None, "a scale is given"),
    (lambda c: bool(c.mask), "attn_mask is given"),
    (lambda c: "alibi_slopes" in c.extras, "alibi_slopes are given"),
    (lambda c: "sinks" in c.extras, "sinks are given"),
    (lambda c: "kv_lengths" in c.extras, "kv_lengths are given"),
    (lambda c: c.dtype != "float32", "the data type has 16 bits"),
    (lambda c: c.dtype == "bfloat16", "the data type is bfloat16"),
    (lambda c: c.dtype == "float16", "the data type is float16"),
    (lambda c: c.dtype == "float32", "the data type is float32"),
)  # fmt: skip


def between(hit: Sequence[Case], others: Sequence[Case]) -> str:
    """Return what the calls of `hit` have and those of `others` have not, in words, at most two; "" for nothing."""
    told = [text for has, text in _OF_CALLS if all(map(has, hit)) and not any(map(has, others))]
    return " and ".join(told[:2])


def pattern(left: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Cause:
    """Describe failures of an unknown cause: by the cases that fail, and by the positions of wrong elements."""
    known = [o for o in outcomes if o.relation == "accuracy" and o.excess]
    hit = [o for o in left if o.relation == "accuracy"] or list(left)
    wanted = {id(o) for o in hit}
    features = [({id(o) for o in known if has(o.case)}, text) for has, text in (*_OF_VALUES, *_OF_CALLS)]
    features = [(having, text) for having, text in features if len(having) < len(known)]  # what all have tells nothing
    best = (0.55, "")
    for n, (having, text) in enumerate(features):
        for also, more in (({id(o) for o in known}, ""), *features[n + 1 :]):
            both = having & also
            inside = len(both & wanted)
            if inside < 0.9 * len(hit) or not both:
                continue
            score = 2 * inside / (len(both) + len(hit)) - 0.05 * bool(more)
            if score > best[0]:
                best = (score, f" where {text}{' and ' if more else ''}{more}")
    outputs = sorted({n for o in hit for n in o.wrong_outputs}, key=list(OUTPUTS).index)
    text = f"{', '.join(outputs) or 'the answer'} {'are' if len(outputs) > 1 else 'is'} wrong{best[1]}"
    advice = "compare the smallest failing case with float64, tile by tile"
    if (noise := _noise(hit)) is not None:
        advice = "keep scores, weights, sums and accumulators in float32"
        text += f" by about {noise:.1e} of the largest value, with both signs and in most elements: like rounding"
        return Cause("low-precision", text, advice, False, len(left))
    code = "unknown"
    if best[1] == f" where {_WITHOUT_LSE}":
        code, advice = "without-lse", "one path must give the same o with and without lse"
    if where := _where(min(hit, key=lambda o: o.case.scores)):
        text += f"; in the smallest case: {where}"
    return Cause(code, text, advice, False, len(left))


def _where(o: Outcome) -> str:
    if not o.wrong_outputs or o.call.signature.ragged:
        return ""
    name = o.wrong_outputs[0]
    wrong = o.limits[name].excess(o.answers[name], o.dtype_of(name))[1] > 1
    return f"{name}: {places.where(wrong, name)}"


def _noise(hit: Sequence[Outcome]) -> float | None:
    """Return the size of errors if they look like rounding (small, in most elements, of both signs), else None."""
    sizes = []
    for o in hit:
        for name in o.wrong_outputs:
            exact = o.limits[name].value.flatten()
            off = o.answers[name].double().flatten() - exact
            largest = float(exact.abs().nan_to_num(0, 0, 0).max())
            if not bool(off.isfinite().all()) or not largest:
                return None
            spread = float((off.abs() > 0.01 * off.abs().max()).double().mean())
            gain = abs(float(off @ exact)) / max(float(off.norm() * exact.norm()), 1e-300)
            if spread < 0.5 or gain > 0.3:
                return None
            sizes.append(float(off.abs().max()) / largest)
    return max(sizes) if sizes and max(sizes) < 0.02 else None
