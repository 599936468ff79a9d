"""`layers_of` makes a layer with the right window for each layer of a model, and refuses encoder-decoders."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch
from transformers import GPT2Config, MistralConfig, T5Config

import flashpoint
from flashpoint.integrations.transformers.held import HeldTensor
from flashpoint.integrations.transformers.layers import RemoteLayer, layers_of


class Owner:
    """A fake cache that records the updates (layer, k, v) of its layers."""

    config = None

    def __init__(self):
        self.updates = []

    def seen(self, layer):
        return 7

    def take_update(self, layer, k, v):
        self.updates.append((layer, k, v))
        return "update"


def test_layers_have_their_numbers_and_windows():
    owner = Owner()
    layers = layers_of(owner, GPT2Config(n_layer=3, n_embd=8, n_head=2))
    assert [(type(layer), layer.number, layer.window) for layer in layers] == [(RemoteLayer, n, None) for n in range(3)]
    sliding = layers_of(owner, MistralConfig(num_hidden_layers=2, sliding_window=5))
    assert [(layer.window, layer.is_sliding) for layer in sliding] == [(5, True), (5, True)]


def test_an_update_goes_to_the_owner_and_comes_back_as_stand_ins():
    owner = Owner()
    layer = layers_of(owner, GPT2Config(n_layer=2, n_embd=8, n_head=2))[1]
    k, v = torch.randn(2, 1, 2, 4, 3)
    held = layer.update(k, v)
    assert [isinstance(t, HeldTensor) and t.update == "update" and t.shape == k.shape for t in held] == [True, True]
    ((number, given_k, given_v),) = owner.updates
    assert (number, given_k is k, given_v is v) == (1, True, True)
    length, first = layer.get_mask_sizes(4)
    assert (int(length), length.cache, first) == (11, owner, 0)


def test_an_encoder_decoder_is_refused():
    with pytest.raises(flashpoint.InvalidInputError, match="config: is an encoder-decoder's"):
        layers_of(Owner(), T5Config())
