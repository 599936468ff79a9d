"""With a `RemoteCache`, whose keys are on a real server, each mode of `generate` gives eager attention's tokens."""

import copy
import os
import signal

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch

import flashpoint
from tests.support.servers import wait_for
from tests.support.small_models import MODELS, gemma3, llama
from tests.support.sockets import held_since

TOKENS = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS)
MASK[1, :5] = 0
MASK[2, :9] = 0
PADDED = {"input_ids": TOKENS * MASK, "attention_mask": MASK}
NEW = 12  # new tokens: twice the window of the models with a sliding window
MODES = {
    "greedy": {"input_ids": TOKENS[:1]},
    "sampled": {"input_ids": TOKENS, "do_sample": True},
    "padded": PADDED,
    "beams": {"input_ids": TOKENS[:1], "num_beams": 4, "num_return_sequences": 2},
    "padded beams": {**PADDED, "num_beams": 3},
    "chunked prefill": {**PADDED, "prefill_chunk_size": 5},
    "prompt lookup": {"input_ids": TOKENS[:1].repeat(1, 2), "prompt_lookup_num_tokens": 3},
    "assisted": {"input_ids": TOKENS[:1]},
}
SLOW, FULL = pytest.mark.slow, pytest.mark.full
# `make test` runs each mode with gemma3 models and each model with padding. `make test-all` adds a third of the others.
PAIRS = [
    pytest.param(model, mode, marks=() if "gemma3" in model or mode == "padded" else FULL if (m + n) % 3 else SLOW)
    for m, model in enumerate(MODELS)
    for n, mode in enumerate(MODES)
    if (model, mode) != ("gemma4", "assisted")  # transformers itself fails: `crop` does not cut the layers' shared keys
]
NAME = "remote_attention_with_cache"


@pytest.fixture(scope="module")
def client(server):
    from flashpoint.integrations.transformers import register  # this import takes seconds, so not at collection

    with flashpoint.Client(server.url, timeout=240) as client:
        register(client, NAME)
        left = held_since(server)
        yield client
        assert not left()


@pytest.fixture(scope="module")
def models():
    made = {}
    return lambda name: made.setdefault(name, MODELS[name]())


def remote(client, model, **how):
    from flashpoint.integrations.transformers import RemoteCache

    model.set_attn_implementation(NAME)
    return RemoteCache(client, model.config, **how)


def generated(model, cache=None, **options):
    """Generate; return the tokens and each step's logits. Without a cache, the attention is eager."""
    if cache is None:
        model.set_attn_implementation("eager")
    else:
        options["past_key_values"] = cache
    torch.manual_seed(0)
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    answer = model.generate(**{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options, **outputs})
    return answer.sequences, torch.stack(answer.logits)


def agree(actual, expected):
    assert actual[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
@pytest.mark.filterwarnings("ignore:.*generation_config")
def test_each_mode_gives_the_models_own_tokens(client, models, name, mode):
    model, options = models(name), dict(MODES[mode])
    if mode == "assisted":
        options["assistant_model"] = llama(num_hidden_layers=1)
    expected = generated(model, **options)
    with remote(client, model) as cache:
        agree(generated(model, cache, **options), expected)
        assert cache.get_seq_length() == expected[0].shape[1] - 1  # no layer has processed the last token


@pytest.mark.parametrize("padded", [False, True])
def test_a_conversation_goes_on_with_the_same_cache(client, models, padded):
    """Padding of the second turn lies between tokens. The server does not store it, but windows count its positions."""
    model = models("gemma3")
    rows = 3 if padded else 1
    turn = {"input_ids": TOKENS[:rows], "attention_mask": MASK[:rows]}
    with remote(client, model) as cache:
        first, _ = generated(model, cache, **turn)
        second = torch.cat((first, TOKENS[:rows].flip(1)), 1)
        mask = torch.cat((turn["attention_mask"], MASK.new_ones(rows, NEW), turn["attention_mask"]), 1)
        actual = generated(model, cache, input_ids=second, attention_mask=mask)
    agree(actual, generated(model, input_ids=second, attention_mask=mask))


def test_a_forward_masks_tokens_that_the_cache_holds(client, models):
    model = models("gemma3")
    tokens, hidden = TOKENS[:2], torch.ones(2, 12, dtype=torch.int64)
    hidden[:, 3] = 0
    logits = []
    for cache in (remote(client, model), None):
        if cache is None:
            model.set_attn_implementation("eager")
        with torch.no_grad():
            cache = model(tokens[:, :8], past_key_values=cache, use_cache=True).past_key_values
            logits.append(model(tokens[:, 8:], past_key_values=cache, attention_mask=hidden).logits)
        cache.reset()
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_a_mask_of_four_dimensions_is_served(client, models):
    model = models("llama")
    mask = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.5
    mask |= torch.eye(12, dtype=torch.bool)
    with torch.no_grad():
        with remote(client, model) as cache:
            actual = model(TOKENS[:2], attention_mask=mask, past_key_values=cache).logits
        model.set_attn_implementation("eager")
        additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        expected = model(TOKENS[:2], attention_mask=additive).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_sequences_share_a_cache_until_their_tokens_differ(client, models, server):
    model, count = models("llama"), held_since(server)
    with remote(client, model) as cache, torch.no_grad():
        model(TOKENS, past_key_values=cache)
        before = count()
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        assert count() == before
        cache.reorder_cache(torch.tensor([1, 1, 0]))  # the sequences 0, 0 and 2 of TOKENS
        two = count()
        assert (len(before), len(two), two < before) == (3, 2, True)
        model(torch.tensor([[5], [5], [6]]), past_key_values=cache)
        assert count() == two
        actual = model(torch.tensor([[5], [7], [6]]), past_key_values=cache).logits
        assert (len(count()), count() & before) == (3, two)
        cache.batch_select_indices(torch.tensor([False, False, True]))
        (last,) = count()
        assert (last in two, cache.batch_size) == (True, 1)
        cache.batch_repeat_interleave(2)
        assert (count(), cache.batch_size) == ({last}, 2)
        model.set_attn_implementation("eager")
        said = torch.cat((TOKENS[[0, 0, 2]], torch.tensor([[5, 5], [5, 7], [6, 6]])), 1)
        torch.testing.assert_close(actual, model(said).logits[:, -1:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", [{"num_return_sequences": 4, "do_sample": True}, {"num_beams": 3}], ids=["n", "beams"])
def test_answers_to_one_prompt_are_forks_of_one_prefill(client, models, kind, mode):
    """Each of two prompts is computed once, not for each answer. The tokens equal those of eager attention."""
    model = models(kind)
    sizes = {"max_new_tokens": 6, "min_new_tokens": 6, **mode}
    prompts = TOKENS[:2].repeat(1, 3)
    counts = []
    with remote(client, model) as cache:
        made = client.attention

        def counted(q, k, v, **options):
            counts.append(len(q))
            return made(q, k, v, **options)

        client.attention = counted
        try:
            torch.manual_seed(0)
            actual = model.generate(input_ids=prompts, past_key_values=cache, pad_token_id=0, **sizes)
        finally:
            del client.attention
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    assert torch.equal(actual, model.generate(input_ids=prompts, pad_token_id=0, **sizes))
    assert set(counts[: model.config.num_hidden_layers]) == {2}
    assert counts[-1] > 2


@pytest.mark.slow
def test_a_deep_copy_goes_its_own_way(client, models):
    model = models("gemma3")
    with remote(client, model) as cache:
        first, _ = generated(model, cache, input_ids=TOKENS[:1])
        with copy.deepcopy(cache) as other:
            ahead = torch.cat((first, TOKENS[1:2]), 1)
            agree(generated(model, other, input_ids=ahead), generated(model, input_ids=ahead))
        model.set_attn_implementation(NAME)
        ahead = torch.cat((first, TOKENS[2:3]), 1)
        agree(generated(model, cache, input_ids=ahead), generated(model, input_ids=ahead))


def test_half_precision_is_the_caches_too(client, server):
    sizes = []
    for model in (llama(), llama().bfloat16()):
        expected, left = generated(model, input_ids=TOKENS[:1])[1], held_since(server)
        with remote(client, model) as cache:
            actual = generated(model, cache, input_ids=TOKENS[:1])[1]
            sizes.append(sum(one.bytes for one in made_since(client, left)))
        torch.testing.assert_close(actual[0], expected[0], rtol=0.05, atol=0.05)
    assert 0 < sizes[1] < sizes[0]


def test_crop_refuses_what_a_window_cannot_go_back_to(client, models):
    model = models("gemma3")
    with remote(client, model, rewind=4) as cache, torch.no_grad():
        for start in range(0, 12, 2):
            model(TOKENS[:1, start : start + 2], past_key_values=cache)
        with pytest.raises(flashpoint.InvalidInputError, match="go back to position 6"):
            cache.crop(-7)
        with pytest.raises(flashpoint.InvalidInputError, match="negative"):
            cache.crop(3)
        cache.crop(-6)
        assert cache.get_seq_length() == 6
        again = model(TOKENS[:1, 6:], past_key_values=cache).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(again, model(TOKENS[:1]).logits[:, 6:], rtol=1e-3, atol=1e-3)


def test_an_attention_that_is_not_ours_is_refused_at_once(client, models):
    model = models("llama")
    with remote(client, model) as cache:
        for other in ("eager", "sdpa"):
            model.set_attn_implementation(other)
            with pytest.raises(flashpoint.InvalidInputError, match="attn_implementation: must be one of flashpoint"):
                model.generate(TOKENS, past_key_values=cache, max_new_tokens=2)
        model.set_attn_implementation(NAME)
        agree(generated(model, cache, input_ids=TOKENS), generated(model, input_ids=TOKENS))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_work_is_refused_in_words(client, models):
    from transformers import Qwen3NextConfig, T5Config

    model = models("llama")
    refused = flashpoint.InvalidInputError
    with pytest.raises(refused, match=r"must be a flashpoint\.Client, not str"):
        remote("http://localhost:8000", model)
    with pytest.raises(refused, match="rewind"):
        remote(client, model, rewind=-1)
    for config, message in ((T5Config(), "encoder-decoder"), (Qwen3NextConfig(num_hidden_layers=4), "LinearAttention")):
        model.config, original = config, model.config
        try:
            with pytest.raises(refused, match=message):
                remote(client, model)
        finally:
            model.config = original
    cache = remote(client, model)
    with pytest.raises(refused, match="no gradients"):
        model(TOKENS, past_key_values=cache)
    with torch.no_grad(), cache:
        model(TOKENS, past_key_values=cache)
        with pytest.raises(refused, match="holds 3 sequences, and the model has 1"):
            model(TOKENS[:1], past_key_values=cache)
        cache.crop(0)
        cache.crop(-12)
        model(PADDED["input_ids"], attention_mask=MASK, past_key_values=cache)
        with pytest.raises(refused, match="shows tokens that"):
            model(TOKENS[:, :1], attention_mask=torch.ones(3, 13), past_key_values=cache)
        cache.reset()
        k = torch.zeros(1, 2, 3, 8)
        cache.update(k, k, 0)
        with pytest.raises(refused, match="keys of layer 0 that no attention used"):
            cache.update(k, k, 1)


def test_a_forward_that_stopped_does_not_count(client, models):
    model = models("llama")
    with remote(client, model) as cache, torch.no_grad():
        model(TOKENS, past_key_values=cache)
        hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(TOKENS, past_key_values=cache)
        hook.remove()
        with pytest.raises(flashpoint.InvalidInputError, match=r"layers 1 from the last forward.*crop\(0\)"):
            model(TOKENS, past_key_values=cache)
        cache.crop(0)
        actual = model(TOKENS.flip(1), past_key_values=cache).logits
        model.set_attn_implementation("eager")
        expected = model(torch.cat((TOKENS, TOKENS.flip(1)), 1)).logits[:, 12:]
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layer", range(4))
def test_a_forward_of_which_a_call_failed_does_not_count(client, models, layer):
    """The last two layers use the keys of earlier ones: when they fail, all tokens have been written."""
    model, made, numbers = models("gemma4"), client.attention, iter(range(4))

    def failing(q, k, v, **options):
        if next(numbers) == layer:
            raise ZeroDivisionError
        return made(q, k, v, **options)

    with remote(client, model) as cache, torch.no_grad():
        model(TOKENS, past_key_values=cache)
        client.attention = failing
        try:
            with pytest.raises(ZeroDivisionError):
                model(TOKENS, past_key_values=cache)
        finally:
            del client.attention
        assert cache.get_seq_length() == 12
        actual = model(TOKENS.flip(1), past_key_values=cache).logits
        model.set_attn_implementation("eager")
        expected = model(torch.cat((TOKENS, TOKENS.flip(1)), 1)).logits[:, 12:]
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def made_since(client, left):
    """Return the caches whose ids `left`, a function of `held_since`, has."""
    return [one for one in client.list_caches() if one.id in left()]


def lost(client, model, cache, code):
    """Check that a forward over a lost cache raises CacheError with `code` and empties it; the next forward works."""
    with pytest.raises(flashpoint.CacheError, match="Call generate again with all tokens") as error:
        generated(model, cache, input_ids=TOKENS.repeat(1, 3))
    assert (error.value.code, cache.get_seq_length()) == (code, 0)
    agree(generated(model, cache, input_ids=TOKENS), generated(model, input_ids=TOKENS))


def test_a_cache_that_is_not_there_any_more_begins_anew(client, models, server):
    model, left = models("llama"), held_since(server)
    with remote(client, model) as cache:
        generated(model, cache, input_ids=TOKENS)
        client.delete_caches(made_since(client, left))
        lost(client, model, cache, "cache_not_found")


def test_the_end_of_a_block_says_what_went_wrong_in_it(client, models, server):
    model, left = models("llama"), held_since(server)
    with flashpoint.Client("http://127.0.0.1:9", retries=0) as gone:
        cache = remote(gone, model)
        with pytest.raises(flashpoint.ConnectionFailedError), cache:
            model.generate(TOKENS, past_key_values=cache, max_new_tokens=2)
        cache = remote(client, model)
        generated(model, cache, input_ids=TOKENS)
        cache.client = gone
        with pytest.raises(ValueError, match="this one"), cache:
            raise ValueError("this one")
    client.delete_caches(made_since(client, left))


@pytest.mark.slow
def test_a_cache_whose_engine_died_begins_anew(start_server):
    from flashpoint.integrations.transformers import register

    server = start_server()
    model = gemma3()
    with flashpoint.Client(server.url, timeout=240) as client:
        register(client, NAME)
        cache = remote(client, model)
        generated(model, cache, input_ids=TOKENS)
        one = client.list_caches()[0]
        os.kill(server.engine_pid, signal.SIGKILL)

        def died():
            try:
                one.refresh()
            except flashpoint.FlashpointError as error:
                return error.code == "cache_lost"

        wait_for(died, lambda: "the cache is still there")
        server.wait_ready()
        lost(client, model, cache, "cache_lost")
