"""examples/minilm.py: a real sentence-embedding model gives the same results with served attention as with its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashpoint
from tests.support.programs import load

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm.py"


@pytest.fixture(scope="module")
def minilm():
    return load(EXAMPLE)


@pytest.fixture(scope="module")
def models(minilm, server):
    from flashpoint.integrations.transformers import NAME, register  # this import takes seconds, so not at collection

    with flashpoint.Client(server.url) as client:
        register(client)
        yield minilm.load("eager"), minilm.load(NAME)


def lengths(n):
    return [" ".join(["word"] * length) for length in n]


@pytest.mark.parametrize("words", [None, [1, 40, 7], [5, 5], [1]], ids=["sentences", "mixed", "even", "one"])
@torch.no_grad()
def test_embeddings_agree_with_the_models_own_attention(minilm, models, words):
    local, served = models
    sentences = minilm.SENTENCES if words is None else lengths(words)
    expected = minilm.encode(local, sentences)
    assert expected.isfinite().all()
    assert (minilm.encode(served, sentences) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_padding_does_not_change_a_sentence(minilm, models):
    served = models[1]
    batch = minilm.encode(served, minilm.SENTENCES)
    alone = torch.cat([minilm.encode(served, [sentence]) for sentence in minilm.SENTENCES])
    assert (batch - alone).abs().max() < 1e-5


def gradients(minilm, model):
    model.zero_grad()
    embeddings = minilm.encode(model, minilm.SENTENCES)
    (embeddings @ embeddings.T - torch.eye(len(embeddings))).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_loss_gives_the_same_parameter_gradients(minilm, models):
    local, served = models
    expected, actual = gradients(minilm, local), gradients(minilm, served)
    assert actual.keys() == expected.keys()
    assert any("query" in name and grad.abs().max() > 1e-3 for name, grad in expected.items())
    # Errors are relative to the largest of all gradients: that of a key bias is 0 in theory, and noise in float32.
    largest = max(grad.abs().max() for grad in expected.values())
    worst = {name: ((actual[name] - grad).abs().max() / largest).item() for name, grad in expected.items()}
    assert max(worst.values()) < 1e-4, max(worst, key=worst.get)


def test_the_example_prints_similarities_and_the_difference(server):
    command = [sys.executable, str(EXAMPLE), "--url", server.url]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    similarity = [float(x) for x in re.findall(r"^ +(-?\d\.\d{3})  \S", printed, re.M)]
    assert similarity[0] == 1.0
    assert similarity[2] == max(similarity[1:])  # the other sentence about a cat
    assert float(re.search(r"own attention: (\S+)", printed)[1]) < 1e-5
