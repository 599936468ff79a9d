"""`flashpoint capacity` predicts times from given rates, and names the argument that is wrong."""

import json

import pytest

import flashpoint
from flashpoint import capacity, cli
from flashpoint.capacity import Rates, need, predict


def test_the_command_computes_from_rates_that_are_given(capsys):
    flags = ["--tflops", "2", "--network-gbit", "8", "--q-len", "1024", "--q-heads", "4", "--head-dim", "64"]
    code = cli.main(["capacity", *flags, "--load", "50", "--json", "-"])
    out, err = capsys.readouterr()
    assert code == 0
    document = json.loads(out)
    shape = flashpoint.Shape(q_heads=4, q_len=1024, head_dim=64)
    rates = Rates(call=0.0016, upload=1e9, download=1e9, flops=2e12, grad_flops=2e12)
    prediction = predict(need(shape), rates)
    assert document["seconds"] == pytest.approx(prediction.seconds)
    assert document["requests_per_second"] == pytest.approx(prediction.requests_per_second)
    assert document["for_load"] == prediction.for_load(50)
    assert document["rates"]["pcie"] is None
    assert "bound by: upload" in err
    assert "http process × 1" in err


def test_the_command_says_what_caches_take(capsys):
    shape = flashpoint.Shape(q_heads=4, kv_heads=2, q_len=1, kv_len=2048, head_dim=64)
    flags = ["--tflops", "2", "--network-gbit", "8", "--q-len", "1", "--kv-len", "2048", "--q-heads", "4"]
    flags += ["--kv-heads", "2", "--head-dim", "64", "--cached", "--layers", "6", "--cache-gb", "1", "--json", "-"]
    assert cli.main(["capacity", *flags]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    nbytes = capacity.cache_bytes(shape, layers=6)
    assert (document["cache"]["bytes"], document["cache"]["that_fit"]) == (nbytes, 10**9 // nbytes)
    assert document["cache"]["seconds_of_a_step"] == pytest.approx(6 * document["seconds"])
    assert f"{nbytes / 1e6:.3g} MB; {10**9 // nbytes} fit" in err
    assert "a step through 6 layers" in err


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("torch.float16", "float16"),
        ("bf16", "bfloat16"),
        ("float", "float32"),
        ("double", "float64"),
    ],
)
def test_names_of_torch_are_data_types(capsys, given, dtype):
    documents = []
    for name in (given, dtype):
        flags = ["--tflops", "2", "--network-gbit", "8", "--q-len", "64", "--head-dim", "8", "--dtype", name]
        assert cli.main(["capacity", *flags, "--json", "-"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8", "--layers", "2"], "--layers"),
        (["--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8", "--cache-gb", "2"], "--cache-gb"),
        (["--q-len", "8", "--head-dim", "8"], "--network-gbit"),
        (["--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "0"], "--head-dim"),
        (["--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8", "--side", "up"], "--side"),
        (["--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8", "--pcie-gb", "-1"], "--pcie-gb"),
        (
            ["--tflops", "1", "--network-gbit", "0", "--q-len", "8", "--head-dim", "8"],
            "--network-gbit: must be above 0",
        ),
        (["--tflops", "0", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8"], "--tflops: must be above 0"),
        (["--tflops", "1", "--network-gbit", "1", "--q-len", "8", "--head-dim", "8", "--memory-gb", "nan"], "above 0"),
        (["--url", "http://localhost:1", "--call-ms", "1", "--q-len", "8", "--head-dim", "8"], "--call-ms"),
    ],
)
def test_the_command_names_what_is_wrong(capsys, flags, message):
    assert cli.main(["capacity", *flags]) == 2
    assert message in capsys.readouterr().err
