"""A problem is cut into parts of nearly equal work, which together contain each visible pair (query, key) once."""

import numpy as np
import pytest

import flashpoint
from flashpoint._calls.service import checked
from flashpoint._shards.plan import UNEVEN, plan
from flashpoint._shards.problem import problem
from flashpoint_contract.schemas.options import AttentionOptions


def made(q_len=96, kv_len=96, heads=(4, 2), batch=2, **keywords):
    shapes = (batch, heads[0], q_len, 8), (batch, heads[1], kv_len, 8), (batch, heads[1], kv_len, 8)
    tensors = dict(zip("qkv", (np.zeros(shape, np.float32) for shape in shapes), strict=True))
    lengths = {name: keywords.pop(name) for name in ("q_lengths", "kv_lengths") if name in keywords}
    return problem({**tensors, **lengths}, checked(AttentionOptions, keywords), "forward")


def visible(whole):
    """Return the number of visible pairs (query, key) of a whole problem."""
    return sum(shard.pairs for shard in plan(whole, 1, None).shards)


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"causal": True, "window": (20, 0)}])
@pytest.mark.parametrize("sizes", [(96, 96), (1, 400), (300, 40)])
def test_the_parts_have_all_pairs_and_nearly_equal_work(servers, keywords, sizes):
    whole = made(*sizes, **keywords)
    cut = plan(whole, servers, None)
    assert sum(shard.pairs for shard in cut.shards) == visible(whole)
    assert 1 <= len(cut.shards) <= servers
    seen = np.zeros((sizes[0], sizes[1]), int)
    for shard in cut.shards:
        seen[shard.queries, shard.keys] += 1
    assert seen.max() == 1
    assert cut.merged == (len({(s.queries.start, s.queries.stop) for s in cut.shards}) < len(cut.shards))
    if sizes == (96, 96) and servers > 1:
        share = visible(whole) / servers
        assert max(shard.pairs for shard in cut.shards) <= UNEVEN * 1.2 * share


def test_one_query_cuts_the_keys_and_equal_lengths_the_queries():
    assert plan(made(1, 400), 4, None).merged
    assert not plan(made(400, 40), 4, None).merged


def test_a_long_sequence_gets_more_servers_than_a_short_one():
    cut = plan(made(q_lengths=[96, 4], kv_lengths=[96, 4]), 4, None)
    by_sequence = [sum(shard.rows.batch.start == n for shard in cut.shards) for n in (0, 1)]
    assert by_sequence == [4, 1]


def test_parts_are_those_that_the_caller_names_and_must_be_counts():
    cut = plan(made(), 2, (2, 3))
    assert len(cut.shards) == 6
    assert cut.merged
    for wrong in ((0, 1), (1, 1 << 17), (1,), (1.0, 1), "22", (True, 1)):
        with pytest.raises(flashpoint.InvalidInputError, match="parts: must be two integers"):
            plan(made(), 2, wrong)


def test_keys_are_not_cut_where_only_the_reference_backend_computes():
    assert not plan(made(1, 400, backend="reference"), 4, None).merged
