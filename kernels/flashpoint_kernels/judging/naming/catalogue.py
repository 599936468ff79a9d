"""The catalogue of known mistakes that can occur in a case. `mutants` computes the answer of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.naming.mutants import Mistake

TILES = (64, 32, 128, 16, 256)
_LIMITS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65535, 65536)


def known(case: Case) -> Iterator[Mistake]:
    """Yield the mistakes of a forward that can occur in a case, the most likely ones first."""
    n, m, d = case.q_len, case.kv_len, case.head_dim
    scale = d**-0.5 if case.scale is None else case.scale

    def make(code: str, text: str, advice: str, **forward: Any) -> Mistake:
        return Mistake(code, text, advice, forward)

    if case.causal:
        advice = "query i sees key j only if j <= i + Sk - Sq (bottom right), or j <= i (top left)"
        yield make("causal-missing", "the causal mask is missing", advice, causal=False)
        for by, text in ((1, "a query sees one key too many"), (-1, "a query does not see its own key")):
            yield make("causal-by-one", f"the causal mask is shifted by one: {text}", advice, diagonal=by)
        if n != m:
            yield make("causal-alignment", "the causal mask is aligned to the other corner",
                advice + "; --causal-alignment names the other", realign=True)  # fmt: skip
        for tile in TILES:
            yield make("causal-tile", f"the causal mask hides or shows whole tiles of {tile} keys", advice,
                block_causal=tile)  # fmt: skip
    else:
        yield make("causal-extra", "a causal mask is used, but not requested", "apply it only with causal=True",
            causal=True)  # fmt: skip
    left, right = case.window
    if case.window != (-1, -1):
        advice = "query i sees keys i + offset - left to i + offset + right, both included"
        yield make("window-missing", "the window is ignored", advice, window=(-1, -1))
        for dl, dr in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)):
            wide = (left + dl if left >= 0 else left, right + dr if right >= 0 else right)
            if wide != case.window and (left < 0 or wide[0] >= 0) and (right < 0 or wide[1] >= 0):
                yield make("window-by-one", f"the window is off by one: [{dl:+d}, {dr:+d}]", advice, window=wide)
        if left >= 0:
            yield make("window-left", "the left side of the window is ignored", advice, window=(-1, right))
        if right >= 0:
            yield make("window-right", "the window sees keys to the right without a limit: the future", advice,
                window=(left, -1))  # fmt: skip
        yield make("window-swapped", "left and right of the window are swapped", advice, window=(right, left))
        if n != m:
            yield make("window-offset", "the window counts from the first key, not from the query's position", advice,
                window_offset=False)  # fmt: skip
        for tile in TILES if left > 0 else ():
            yield make("window-tile", f"the window begins with a whole tile of {tile} keys", advice, window_tile=tile)
        if case.causal:
            yield make("window-causal", "causal is ignored where a window is given", advice, causal=False)
    advice = "multiply q·k by the scale once: the given one, or 1/sqrt(D)"
    yield make("scale-missing", "the scale is missing", advice, scale=1.0)
    if case.scale is not None:
        yield make("scale-ignored", "the given scale is ignored", advice, scale=d**-0.5)
        yield make("scale-both", "the given scale and 1/sqrt(D) are both applied", advice, scale=scale * d**-0.5)
    padded = {"Dv": case.value_dim, "the next power of 2": 1 << (d - 1).bit_length(), "128": 128, "64": 64}
    padded |= {f"the next multiple of {n}": -(-d // n) * n for n in (16, 32, 64)}
    for what, size in padded.items():
        if size != d:
            yield make("scale-padded", f"the scale is 1/sqrt of {what}, not of D", advice, scale=size**-0.5)
    yield make("scale-dim", "the scale is 1/D, not 1/sqrt(D)", advice, scale=1 / d)
    yield make("scale-twice", "the scale is applied twice", advice, scale=scale**2)
    for factor, text in (
        (math.log(2), "exp2 is used without log2(e)"),
        (math.log2(math.e), "the factor log2(e) is applied with exp"),
    ):
        yield make("base-2", text, "exp(x) = exp2(x · log2(e))", log2=factor)
    if case.softcap:
        advice = "s = softcap · tanh(scale · q·k / softcap), before mask and bias"
        yield make("softcap-missing", "the softcap is ignored", advice, softcap=0.0)
        yield make("softcap-late", "the softcap is applied after the mask: hidden keys have a score of -softcap",
            advice, cap="late", empty=True)  # fmt: skip
        yield make("softcap-unscaled", "the softcap is applied before the scale", advice, cap="unscaled")
        yield make("softcap-factor", "the factor softcap after tanh is missing", advice, cap="forgotten")
        yield make("softcap-twice", "the softcap is applied twice", advice, cap="twice")
    if case.group > 1:
        advice = "query head h uses key head h // (Hq / Hk)"
        if case.kv_heads > 1:
            yield make("group-head", "query head h uses key head h % Hk", advice, heads="mod")
        yield make("group-head", "all query heads use the first key head", advice, heads="first")
        yield make("group-head", "query head h uses key head h, and the last one beyond", advice, heads="clamped")
        yield make("group-head", "key heads are used in reverse order", advice, heads="reversed")
        for size, heads in ((2, "twos"), (4, "fours")):
            if case.group != size:
                text = f"query head h uses key head h // {size}, whatever the group's size"
                yield make("group-head", text, advice, heads=heads)
    if case.batch > 1:
        yield make("batch-index", "all sequences use keys and values of the first",
            "check the batch stride of k and v", batch="first")  # fmt: skip
    advice = "hide keys j >= Sk in the last tile with -inf before the maximum and the sum"
    for tile in TILES:
        if m % tile:
            yield make("padded-keys",
                f"padded keys are counted: the last tile of {tile} is filled up with keys that have a score of 0",
                advice, pad=tile)  # fmt: skip
            if m > tile:
                yield make("last-tile", f"the last, partial tile of {tile} keys is ignored", "loop to ceil(Sk / tile)",
                    keys=m // tile * tile)  # fmt: skip
        if m > tile:
            yield make("last-tile", f"the last tile of {tile} keys is ignored", "loop to ceil(Sk / tile)",
                keys=(-(-m // tile) - 1) * tile)  # fmt: skip
            yield make("first-tile", f"the first tile of {tile} keys is ignored", "start the loop at key 0",
                first_keys=tile)  # fmt: skip
        if n > tile and n % tile:
            yield make("query-tail", f"rows of the last, partial tile of {tile} queries are not computed",
                "launch ceil(Sq / tile) programs", rows=n // tile * tile)  # fmt: skip
    if case.batch > 1:
        advice = "check the batch index and stride of k and v"
        yield make("batch-index", "all sequences use keys and values of the last", advice, batch="last")
        if case.batch > 2:
            yield make("batch-index", "sequence b uses keys and values of sequence b % 2", advice, batch="mod 2")
            yield make("batch-index", "sequence b uses keys and values of sequence b // 2", advice, batch="halves")
    for limit in _LIMITS:
        if limit < m:
            yield make("key-limit", f"keys from {limit} on are ignored",
                "check the loop's limit and the width of its index", keys=limit)  # fmt: skip
        if limit < n:
            yield make("query-limit", f"queries from {limit} on are not computed", "check the grid's size", rows=limit)
    yield make("key-missing", "the last key is ignored", "loop to Sk, not Sk - 1", without=-1)
    yield make("key-missing", "the first key is ignored", "start the loop at key 0", without=0)
    advice = "when the maximum rises, multiply the sum and the accumulator by exp(old - new)"
    for tile in TILES:
        if m > tile:
            for skip, what in (
                ("values", "the accumulator is"),
                ("sum", "the sum is"),
                ("both", "the sum and the accumulator are"),
                ("maximum", "tiles with their own maximum are"),
            ):
                yield make("missing-rescale", f"{what} not rescaled when the maximum rises (tiles of {tile} keys)",
                    advice, tile=tile, skip=skip)  # fmt: skip
            for far in (4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0):
                text = f"tiles of {tile} keys whose scores are {far:g} below the maximum are skipped"
                hint = "skip only tiles whose keys are all hidden: many small weights add up"
                yield make("skipped-tiles", text, hint, tile=tile, far=far)
            yield make("maximum-of-first-tile", f"only the first tile of {tile} keys has a say in the maximum", advice,
                max="first", of=tile)  # fmt: skip
    advice = "start the running maximum at -inf, hide keys with -inf, and treat a row without keys by itself"
    for start in (-1e4, -5e4, -1e5, -65504.0, -3e4, -1e3, -100.0, -50.0, -10.0, 0.0):
        for zero in (True, False):
            text = f"the running maximum starts at {start:g}, a finite number, in place of -inf"
            yield make("sentinel", text, advice, max="least", start=start, nan_to_zero=zero)
    if bool(case.causal or case.window != (-1, -1) or case.mask):
        for fill in (-1e9, -1e4, -5e4, -1e5, -65504.0, -100.0, -1e3, -3e38, 0.0, -1.0, -10.0, -30.0):
            text = f"hidden keys have a score of {fill:g}, a finite number, in place of -inf"
            yield make("sentinel", text, advice, fill=fill, empty=True)
    yield make("no-maximum", "exp is taken without subtracting the row's maximum: it overflows or underflows",
        "subtract the running maximum", max="none")  # fmt: skip
    yield make("no-maximum", "exp is taken without subtracting the row's maximum: it overflows or underflows",
        "subtract the running maximum", max="none", nan_to_zero=True)  # fmt: skip
    for which, what in (("heads", "all heads and rows"), ("rows", "all rows of a head")):
        for zero in (True, False):
            text = f"{what} share one maximum: smaller scores underflow"
            yield make("no-maximum", text, "each row has its own maximum", max=which, nan_to_zero=zero)
    for low in (-10.0, -20.0, -16.0, -12.0, -8.0, -15.0, -30.0, -25.0, -40.0, -50.0, -60.0, -80.0):
        yield make("clamped-exponent", f"exponents are clamped at {low:g}",
            "do not clamp: exp of a very negative number is 0", clamp=(low, math.inf))  # fmt: skip
    for high in (80.0, 60.0, 50.0, 30.0, 20.0, 10.0, 88.0):
        yield make("clamped-exponent", f"scores are clamped at {high:g} in place of subtracting the maximum",
            "subtract the running maximum", clamp=(-high, high), max="none")  # fmt: skip
    for epsilon in (1e-6, 1e-3, 1e-5, 1e-4, 1e-8, 1.0):
        yield make("epsilon", f"{epsilon:g} is added to the sum of weights",
            "a row with a key has a sum of at least 1: add nothing", epsilon=epsilon)  # fmt: skip
    yield make("no-normalisation", "the output is not divided by the sum of weights",
        "divide the accumulator by the sum", norm="none")  # fmt: skip
    if case.mask:
        yield make("mask-missing", "attn_mask is ignored", "add it to the scores, or hide where it is false",
            no_mask=True)  # fmt: skip
        if case.mask.startswith("bool"):
            yield make("mask-inverted", "attn_mask is inverted: true means that a key is visible",
                "hide where it is false", mask="inverted")  # fmt: skip
        else:
            yield make("mask-scaled", "attn_mask is multiplied by the scale", "add it after the scale", mask="scaled")
        yield make("mask-batch", "all sequences use the mask of the first", "check the batch stride of attn_mask",
            mask="first sequence")  # fmt: skip
        yield make("mask-head", "all heads use the mask of the first", "check the head stride of attn_mask",
            mask="first head")  # fmt: skip
    if "alibi_slopes" in case.extras:
        yield make("alibi", "alibi_slopes are ignored", "subtract slope · |i + offset - j|", no_alibi=True)
        yield make("alibi", "the ALiBi bias is added, not subtracted", "subtract slope · |i + offset - j|",
            alibi="added")  # fmt: skip
        yield make("alibi", "ALiBi counts queries from the first key", "the distance is |i + Sk - Sq - j|",
            alibi="absolute")  # fmt: skip
        yield make("alibi", "slopes are used in reverse order", "head h has slope h", alibi="reversed")
        yield make("alibi", "the usual slopes are used, not the given ones", "read alibi_slopes", alibi="usual")
        if case.q_heads > 32:
            yield make("alibi", "heads from 32 on use the slopes of heads from 0 on", "head h has slope h",
                alibi="mod 32")  # fmt: skip
    if "kv_lengths" in case.extras:
        advice = "hide keys from kv_lengths on, in the last tile, too"
        yield make("kv-lengths", "kv_lengths are ignored", advice, lengths="none")
        for tile in TILES:
            yield make("kv-lengths", f"lengths of keys are rounded up to multiples of {tile}", advice, lengths=tile)
    if "sinks" in case.extras:
        advice = "add exp(sink - maximum) to the sum of weights once"
        yield make("sinks", "sinks are ignored", advice, sinks="none")
        for text, change in (
            ("added twice, as in two splits of the keys", (1.0, math.log(2), math.inf)),
            ("multiplied by the scale", (scale, 0.0, math.inf)), ("taken in base 2", (math.log(2), 0.0, math.inf)),
            *((f"at most {most:g}", (1.0, 0.0, most)) for most in (0.0, 1.0, 4.0, 10.0)),
        ):  # fmt: skip
            yield make("sinks", f"sinks are {text}", advice, sinks=change)
    if case.causal and n > m:
        yield make("empty-rows", "rows without keys are not 0", "write 0 where no key is visible", fill=-1e30,
            empty=True)  # fmt: skip
    for dims in (16, 32, 64, 96, 128):
        if dims < d:
            yield make("head-dim-tail", f"dimensions of q and k from {dims} on are ignored",
                "pad D to the tile, and mask the loads", dims=dims)  # fmt: skip
        if dims < case.value_dim:
            yield make("head-dim-tail", f"dimensions of v from {dims} on are ignored",
                "pad Dv to the tile, and mask the stores", columns=dims)  # fmt: skip
    for kind, text in (("tf32", "TF32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        if case.dtype == "float32":
            yield make("tf32" if kind == "tf32" else "low-precision", f"products of float32 are computed in {text}",
                'ask for full float32 products (input_precision="ieee"), or judge with --precision tf32',
                products=kind)  # fmt: skip
    for kind, text in (("bf16", "bfloat16"), ("fp16", "float16")):
        if case.dtype == "float32" or (case.dtype, kind) == ("bfloat16", "fp16"):
            yield make("low-precision", f"o is rounded to {text}",
                f"keep o in float32, and round it once, to {case.dtype}", rounded=kind)  # fmt: skip
    for kind, text in (("fp8", "8 bits"), ("bf16", "bfloat16"), ("fp16", "float16")):
        yield make("low-precision-weights", f"the weights P are rounded to {text}",
            "keep P in float32, or in the type of v", weights=kind)  # fmt: skip
        yield make("low-precision-scores", f"scores are rounded to {text}", "keep scores in float32", scores=kind)
        text_raw = f"q·k is rounded to {text} before the scale"
        yield make("low-precision-scores", text_raw, "keep scores in float32", raw=kind)
        for tile in TILES[:3]:
            yield make("low-precision-sum", f"the accumulator is kept in {text}", "accumulate in float32", tile=tile,
                acc=kind)  # fmt: skip
            yield make("low-precision-sum", f"the sum of weights is kept in {text}", "accumulate in float32",
                tile=tile, sums=kind)  # fmt: skip


def of_gradients(case: Case) -> Iterator[Mistake]:
    """Yield the mistakes that only a backward makes."""
    n, m = case.q_len, case.kv_len
    scale = case.head_dim**-0.5 if case.scale is None else case.scale

    def make(code: str, text: str, advice: str, **backward: Any) -> Mistake:
        return Mistake(code, text, advice, {}, backward)

    if case.group > 1:
        advice = "dk and dv are sums over the query heads of a group"
        for which, what in (
            ("first", "the first query head of a group alone"),
            ("last", "the last query head of a group alone"),
            ("mean", "the mean of a group's query heads"),
        ):
            yield make("group-gradient", f"dk and dv are not summed over a group: they are of {what}", advice,
                group=which)  # fmt: skip
        if case.kv_heads > 1:
            yield make("group-gradient", "dk and dv are summed over the wrong query heads (h % Hk)", advice,
                group_order="mod")  # fmt: skip
        yield make("group-gradient", "dq is written for the first query head of a group alone",
            "each query head has its own dq", heads="first")  # fmt: skip
    if case.batch > 1:
        for which in ("first", "last"):
            yield make("batch-gradient", f"dk and dv are written for the {which} sequence alone",
                "check the batch stride of dk and dv", batch=which)  # fmt: skip
    if case.causal and n > m:
        advice = "rows without keys have no weights: set P to 0 there, since exp(s - lse) is exp(-inf + inf)"
        for dead in (1.0, 1 / m):
            for values in (False, True):
                text = f"rows without keys have weights of {dead:.3g} in the backward"
                yield make("empty-rows-gradient", text, advice, dead=dead, dead_values=values)
    advice = "ds = p · (dp - delta) with delta = rowsum(o · do)"
    yield make("delta-missing", "delta = rowsum(o · do) is missing in dS", advice, delta="none")
    yield make("delta-sign", "delta is added, not subtracted", advice, delta="negative")
    yield make("delta-wrong", "delta is rowsum(do), not rowsum(o · do)", advice, delta="sum")
    yield make("delta-wrong", "delta is rowsum(o), as if do were 1", advice, delta="sum of o")
    yield make("delta-head", "all heads use delta of the first", "check the head stride of delta", delta="first head")
    if case.softcap:
        advice = "multiply dS by 1 - tanh(s / softcap)²"
        yield make("softcap-gradient", "the derivative of the softcap is missing", advice, softcap="no derivative")
        yield make("softcap-gradient", "the derivative of the softcap is taken at the capped score", advice,
            softcap="of the capped")  # fmt: skip
    for limit in _LIMITS:
        if limit < m:
            yield make("gradient-key-limit", f"the backward ignores keys from {limit} on",
                "check the loop's limit and the width of its index", keys=limit, tail_keys=limit)  # fmt: skip
        if limit < n:
            yield make("gradient-query-limit", f"the backward ignores queries from {limit} on", "check the grid's size",
                rows=limit, tail_rows=limit)  # fmt: skip
    advice = "do not clip inside the kernel: gradients of real activations are large"
    for most in (1.0, 10.0, 100.0, 5.0, 2.0, 0.5, 0.1, 1e3, 1e4, 65504.0):
        yield make("clamped-gradient", f"dS is clipped to [-{most:g}, {most:g}]", advice, ds_most=most)
        yield make("clamped-gradient", f"dP is clipped to [-{most:g}, {most:g}]", advice, dp_most=most)
    advice = "small weights count where do or v is large: skip none but those of hidden keys"
    for threshold in (1e-3, 1e-4, 1e-2, 1e-5, 1e-6, 2.0**-10, 2.0**-14, 2.0**-24):
        yield make("skipped-weights", f"the backward skips weights below {threshold:.2g}", advice, least=threshold)
    for tile in TILES:
        for length, keys in ((n, "rows"), (m, "keys")):
            cuts = {length // tile * tile: "the last, partial tile", (-(-length // tile) - 1) * tile: "the last tile"}
            for cut, what in cuts.items():
                if not 0 <= cut < length:
                    continue
                code, advice = "gradient-tile", f"loop over ceil(length / {tile}) tiles"
                if keys == "rows":
                    yield make(code, f"dk and dv miss {what} of {tile} queries", advice, rows=cut)
                    yield make(code, f"dq of {what} of {tile} queries is not written", advice, tail_rows=cut)
                    text = f"the backward does not visit {what} of {tile} queries"
                    yield make(code, text, advice, rows=cut, tail_rows=cut)
                else:
                    yield make(code, f"dq misses {what} of {tile} keys", advice, keys=cut)
                    yield make(code, f"dk and dv of {what} of {tile} keys are not written", advice, tail_keys=cut)
                    text = f"the backward does not visit {what} of {tile} keys"
                    yield make(code, text, advice, keys=cut, tail_keys=cut)
        if n > tile:
            yield make("gradient-tile", f"dk and dv miss the first tile of {tile} queries",
                "start the loop at the first visible query", first_rows=tile)  # fmt: skip
    for name in ("dq", "dk", "dv"):
        for factor, what in (
            (1 / scale, "the scale is missing in"),
            (scale, "the scale is applied twice in"),
            (math.log(2), "ln 2 is applied to"),
            (math.log2(math.e), "log2(e) is applied to"),
            (-1.0, "the sign is wrong in"),
            (0.5, "a half is missing in"),
            (2.0, "a factor 2 is in"),
            (0.0, "nothing is written to"),
        ):
            if not math.isclose(factor, 1.0):
                yield make("gradient-factor", f"{what} {name}",
                    "ds is multiplied by the scale once, for dq and for dk; dv has none",
                    **{name: factor})  # fmt: skip
    both = {"dq": 1 / scale, "dk": 1 / scale}
    yield make("gradient-factor", "the scale is missing in dq and dk",
        "ds is multiplied by the scale once, for dq and for dk", **both)  # fmt: skip
    yield make("gradient-factor", "the scale is applied twice in dq and dk", "ds is multiplied by the scale once",
        dq=scale, dk=scale)  # fmt: skip
    for mistake in known(case):
        if mistake.code.startswith(
            ("causal", "window", "scale", "softcap", "mask", "alibi", "group-head", "base-2", "head-dim")
        ):
            text = f"in the backward, {mistake.text}"
            yield Mistake(f"backward-{mistake.code}", text, mistake.advice, {}, {"forward": mistake.forward})
    for kind, text in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp8", "8 bits")):
        yield make("low-precision-gradient", f"dS is rounded to {text}", "keep dS in float32, or in the type of q",
            ds=kind)  # fmt: skip
        yield make("low-precision-gradient", f"P of dv is rounded to {text}", "keep P in float32, or in the type of v",
            weights=kind)  # fmt: skip
        yield make("low-precision-gradient", f"delta is rounded to {text}", "keep delta in float32", delta="rounded",
            to=kind)  # fmt: skip
        if kind != "fp8":
            yield make("low-precision-lse", f"the backward reads lse rounded to {text}", "keep lse in float32",
                lse=kind)  # fmt: skip
