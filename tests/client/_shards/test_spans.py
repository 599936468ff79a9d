"""A `ShardedCache` has spans of tokens on several servers. Its attention equals float64 over the whole sequence."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
import flashpoint
from flashpoint import sharded
from tests.support.sharded import BOUNDS, HQ, SHAPE, D, expected, in_layout, near, normal, tokens


@st.composite
def problems(draw):
    """Draw (tokens per span, [tokens of each write], number of queries of the final read, dtype, keywords)."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    pieces = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    total, count = sum(pieces), draw(st.integers(1, 12))
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))
    keywords = {"layout": pick("bhsd", "bshd"), "causal": draw(st.booleans())}
    keywords |= {"window": (pick(-1, 0, 3, 11), pick(-1, 0, 2))} if draw(st.booleans()) else {}
    keywords |= pick({}, {"softcap": 3.0}, {"scale": 0.3}, {"backend": "tiled"})
    keywords |= {"alibi_slopes": numbers.random(HQ).astype(np.float32)} if draw(st.booleans()) else {}
    keywords |= {"sinks": numbers.standard_normal(HQ).astype(np.float32)} if draw(st.booleans()) else {}
    if mask := pick(None, None, "bool", "float"):
        shape = [size if draw(st.booleans()) else 1 for size in (HQ, count, total + pick(0, 2))]
        values = numbers.standard_normal(shape[draw(st.integers(0, 2)) :]).astype(np.float32)
        keywords["attn_mask"] = values if mask == "float" else values > -0.5
    dtype = pick(np.float32, np.float32, np.float16, ml_dtypes.bfloat16)
    return pick(3, 7, 100), pieces, count, dtype, keywords


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 100))
def test_any_problem_is_as_float64_solves_it_over_the_whole(clients, problem, seed):
    """Attention equals float64. Each call writes tokens, which may cross spans, and reads all; the last only reads."""
    span, pieces, count, dtype, keywords = problem
    layout, total = keywords["layout"], sum(pieces)
    q = normal(1, HQ, total, D, seed=seed, dtype=dtype)
    k, v = (t.astype(dtype) for t in tokens(total, seed + 1))
    plain = {name: value for name, value in keywords.items() if name not in ("layout", "attn_mask", "backend")}
    with sharded.cache(clients, **SHAPE, dtype=np.dtype(dtype).name, span=span) as cache:
        given_ = {**plain, "layout": layout} | {name: keywords[name] for name in ("backend",) if name in keywords}
        first = 0
        for piece in pieces:
            new = [in_layout(t[:, :, first : first + piece], layout) for t in (q, k, v)]
            first += piece
            o, lse = cache.attention(*new, **given_, return_lse=True)
            wanted = expected(q[:, :, first - piece : first], k[:, :, :first], v[:, :, :first], **plain)
            near(in_layout(o, layout), wanted[0], BOUNDS[o.dtype])
            near(lse, wanted[1], 4e-6)
        assert cache.lengths == [total]
        q = normal(1, HQ, count, D, seed=seed + 3, dtype=dtype)
        (o, lse), parts = cache.attention(in_layout(q, layout), return_lse=True, with_meta=True, **keywords)
        mask = {"attn_mask": keywords["attn_mask"][..., :total]} if "attn_mask" in keywords else {}
        wanted = expected(q, k, v, **plain, **mask)
        near(in_layout(o, layout), wanted[0], BOUNDS[o.dtype])
        near(lse, wanted[1], 4e-6)
        assert all(0 <= a < b <= min(a + span, total) and a % span == 0 for a, b in (part.keys for part in parts))
        near(o, cache.attention(in_layout(q, layout), **keywords), 0)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"dropout_p": 0.1}, "dropout_p"), ({"return_key_weights": True}, "return_key_weights"),
        ({"layout": "thd"}, "layout"), ({"q_lengths": [1]}, "q_lengths"),
        ({"causal": True, "causal_alignment": "top_left"}, "causal_alignment"), ({"at": 0}, "at"),
        ({"layer": 1}, "layer"),
        ({"attn_mask": np.ones((1, 2), bool)}, "attn_mask"), ({"sinks": np.ones(3, np.float32)}, "sinks"),
        ({"cu_seqlens_q": [0, 1]}, "cu_seqlens_q"), ({"k": tokens(1)[0]}, "v"), ({"grads": ["dq"]}, "grads"),
        ({"k": tokens(2)[0], "v": tokens(2)[1]}, "k"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_what_no_server_alone_can_do_is_refused_by_name(clients, keywords, field):
    with sharded.cache(clients, **SHAPE, span=3) as cache:
        cache.append(*tokens(5))
        with pytest.raises(flashpoint.InvalidInputError) as error:
            cache.attention(normal(1, HQ, 1, D), **keywords)
        assert [problem.field for problem in error.value.errors] == [field]
        assert cache.length == 5
