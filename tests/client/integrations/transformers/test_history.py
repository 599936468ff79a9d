"""After random operations (forwards, padding, crops, copies, reordered rows), a `RemoteCache` gives eager's logits."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch

import flashpoint
from tests.support.small_models import WINDOW, gemma3

NAME = "remote_attention_of_histories"
REWIND = 8


class Histories(RuleBasedStateMachine):
    """Random operations on a cache. Eager attention recomputes all positions of `tokens` and `mask`, to compare."""

    client = model = None

    def __init__(self):
        super().__init__()
        from flashpoint.integrations.transformers import RemoteCache

        self.cache = RemoteCache(self.client, self.model.config, rewind=REWIND)
        self.others = []
        self.seed = 0
        self.begin()

    def begin(self):
        self.tokens, self.mask = torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.int64)
        self.last = 0  # first position of the latest forward

    def teardown(self):
        for cache in (self.cache, *self.others):
            cache.close()

    @property
    def rows(self):
        return len(self.tokens)

    @rule(count=st.integers(1, 5), rows=st.integers(1, 3), equal=st.booleans(), data=st.data())
    def forward(self, count, rows, equal, data):
        """Run a forward of `count` tokens. With `equal`, all rows get equal tokens, so they can share a cache."""
        if not self.rows:
            self.tokens = self.mask = torch.zeros(rows, 0, dtype=torch.int64)
        padding = data.draw(st.lists(st.integers(0, count), min_size=self.rows, max_size=self.rows))
        padding = padding[:1] * self.rows if equal else padding
        right = data.draw(st.booleans())
        valid = torch.stack([(torch.arange(count) >= n).long() for n in padding])
        valid = valid.flip(1) if right else valid
        self.seed += 1
        new = torch.randint(1, 50, (self.rows, count), generator=torch.Generator().manual_seed(self.seed))
        new = (new[:1].expand(self.rows, -1) if equal else new) * valid
        self.last = max(self.last, self.tokens.shape[1])
        self.tokens, self.mask = torch.cat((self.tokens, new), 1), torch.cat((self.mask, valid), 1)
        with torch.no_grad():
            self.model.set_attn_implementation(NAME)
            actual = self.model(new, attention_mask=self.mask, past_key_values=self.cache).logits
            self.model.set_attn_implementation("eager")
            expected = self.model(self.tokens, attention_mask=self.mask, use_cache=False).logits[:, -count:]
        torch.testing.assert_close(actual[valid.bool()], expected[valid.bool()], rtol=1e-3, atol=1e-3)
        assert self.cache.get_seq_length() == self.tokens.shape[1]

    @precondition(lambda self: self.rows)
    @rule(count=st.integers(0, 12))
    def crop(self, count):
        length = max(0, self.tokens.shape[1] - count)
        if 0 < length < self.last - REWIND:
            with pytest.raises(flashpoint.InvalidInputError, match="go back"):
                self.cache.crop(-count)
            return
        self.cache.crop(-count)
        self.tokens, self.mask = self.tokens[:, :length], self.mask[:, :length]
        if not length:
            self.begin()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def take(self, data):
        row = st.integers(0, self.rows - 1)
        sources = data.draw(st.lists(row, min_size=self.rows, max_size=self.rows))
        self.cache.reorder_cache(torch.tensor(sources))
        self.tokens, self.mask = self.tokens[sources], self.mask[sources]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), repeats=st.integers(1, 2))
    def resize(self, data, repeats):
        keep = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=2))
        self.cache.batch_select_indices(torch.tensor(keep))
        self.cache.batch_repeat_interleave(repeats)
        self.tokens, self.mask = (t[keep].repeat_interleave(repeats, 0) for t in (self.tokens, self.mask))

    @rule(swap=st.booleans())
    def fork(self, swap):
        other = copy.deepcopy(self.cache)
        self.cache, other = (other, self.cache) if swap else (self.cache, other)
        self.others.append(other)

    @rule()
    def reset(self):
        self.cache.reset()
        self.begin()


@pytest.mark.slow
def test_every_history_gives_the_models_own_logits(server):
    from flashpoint.integrations.transformers import register

    assert WINDOW < REWIND
    with flashpoint.Client(server.url, timeout=240) as client:
        register(client, NAME)
        Histories.client, Histories.model = client, gemma3()
        run = settings(max_examples=8, stateful_step_count=15, deadline=None)
        run_state_machine_as_test(Histories, settings=run)
