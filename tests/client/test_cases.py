"""`save_case` saves a problem and its answer to a file with its options, and `flashpoint verify` judges the file."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
import torch

import flashpoint
from flashpoint.cases import read_case
from flashpoint_kernels import attention


def test_a_case_is_saved_and_judged_with_its_options(run, tmp_path):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    o, lse = attention(q, k, v, causal=True, scale=0.2, return_lse=True)
    path = flashpoint.save_case(tmp_path / "c.safetensors", q=q, k=k, v=v, o=o, lse=lse, causal=True, scale=0.2)
    tensors, options = read_case(path)
    assert options == {"causal": True, "scale": 0.2}
    assert np.array_equal(tensors["o"], o.numpy())
    code, out, _ = run("verify", path)
    assert code == 0
    assert "options: causal=true, scale=0.2; not given, so the default: layout=bhsd" in out
    assert out.endswith("PASS\n")


def test_a_default_that_is_named_is_saved_too(tmp_path):
    x = np.zeros((2, 4), np.float32)
    path = flashpoint.save_case(tmp_path / "c", q=x, k=x, v=x, causal=False, window=(-1, 3))
    assert read_case(path)[1] == {"causal": False, "window": [-1, 3]}


def test_an_unknown_name_of_a_case_gets_a_hint(tmp_path):
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(
        flashpoint.InvalidInputError, match=r"is_causal: unknown option or tensor; did you mean causal\?"
    ):
        flashpoint.save_case(tmp_path / "c", q=x, k=x, v=x, is_causal=True)
    assert not (tmp_path / "c").exists()


def test_a_wrong_case_says_where_and_why(run, tmp_path):
    q, k, v = (torch.randn(2, 3, 20, 16) for _ in range(3))
    o, lse = attention(q, k, v, scale=1.0, return_lse=True)
    o = attention(q, k, v)
    o[1, 2, 7, 5] += 1
    path = flashpoint.save_case(tmp_path / "c", q=q, k=k, v=v, o=o, lse=lse)
    code, out, _ = run("verify", path)
    assert code == 1
    assert "o is off by 1.0e+00, over the bound of" in out
    assert "at batch 1, head 2, row 7, column 5: " in out
    assert "  wrong: 1 of 1920 elements; sequence 1 (the last) of 2; head 2 (the last) of 3; row 7 of 20" in out
    assert "cause: the scale is missing [scale-missing, confirmed]\n  hint: multiply q·k by the scale once" in out
    assert out.endswith("FAIL\n")
