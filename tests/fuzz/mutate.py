"""A mutator that changes one value in a JSON document, because random changes of bytes seldom leave valid JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

# Values that often reveal bugs: limits of types, floats and sizes, and names of tensors, dtypes and options.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 255, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 53, (1 << 60) - 1, 1 << 62, (1 <<
    63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, 10**400, 0.5, -0.0, 1e-45, 1e-320, 3.4e38, 1e39, 1.7e308, "",
    "NaN", "Infinity", "-Infinity", "null", "true", "\x00", "é", "\U0001f600", "\ud800", "__metadata__", [], {}, [[]],
    [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]], {"shape": [0], "data": []}, {"shape": [1 << 59, 0], "data": []}, [0, 0], [1],
    "q", "k", "v", "do", "o", "lse", "dlse", "attn_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths",
    "cu_seqlens_q", "cu_seqlens_k", "float16", "bfloat16", "float32", "float64", "F16", "BF16", "F32", "F64", "I64",
    "BOOL", "F8_E4M3", "FP16", "BF16", "FP32", "FP64", "INT32", "INT64", "bhsd", "bshd", "thd", "top_left", "tf32",
    "cpu", "tiled", "reference", "triton", "causal", "window", "window_left", "scale", "softcap", "dropout_p",
    "dropout_seed", "return_lse", "grads", "backend", "layout", "precision", "dq", "dattn_mask", "dsinks", "dtype",
    "data_offsets", "binary_data_size", "binary_data", "shared_memory_region", "shared_memory_byte_size",
    "parameters", "outputs",
)  # fmt: skip


def mutated(data: bytes, rng: Random) -> bytes | None:
    """Return the JSON `data` with one value changed, inserted or removed, or None if it is no JSON or has no values."""
    try:
        document = json.loads(data)
        places = list(_places(document))
        if not places:
            return None
        inside, key = rng.choice(places)
        other = rng.choice(places)
        value = rng.choice((rng.choice(VALUES), other[0][other[1]], _nudged(inside[key], rng)))
        how = rng.randrange(4)
        if isinstance(inside, dict):
            if how == 0:
                del inside[key]
            elif how == 1:
                name = rng.choice(VALUES)
                inside[name if isinstance(name, str) else str(other[1])] = value
            else:
                inside[key] = value
        elif how == 0:
            del inside[key]
        elif how == 1:
            inside.insert(key, value)
        else:
            inside[key] = value
        return json.dumps(document).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None


def _places(value: Any) -> Any:
    """Yield (container, key or index) of every value inside `value`."""
    for key, inner in list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _places(inner)


def _nudged(value: Any, rng: Random) -> Any:
    """Return a value near the given one. If it is a string that contains JSON, one value of this JSON is changed."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return rng.choice(
            (value + 1, value - 1, -value, value * 2, float(value) if abs(value) < 1 << 53 else 0, str(value))
        )
    if isinstance(value, str):
        inner = mutated(value.encode("utf-8", "surrogatepass"), rng)
        return (
            inner.decode("utf-8", "surrogatepass") if inner else rng.choice((value + value, value[:-1], value.upper()))
        )
    return [value] if rng.randrange(2) else json.dumps(value)
