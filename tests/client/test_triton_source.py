"""Without a GPU, a function that must launch a Triton kernel is refused at once; any other one is run."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.triton_source import lacks_gpu, launches

REPOSITORY = Path(__file__).parents[2]
KERNEL = """
import triton
import triton.language as tl

@triton.autotune(configs=[], key=[])
@triton.jit
def kernel(x):
    tl.store(x, 0)

def helper(x):
    with device(x):
        kernel[(1,)](x)

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return helper(x)

"""


@pytest.mark.parametrize(
    ("body", "certain"),
    [
        ("kernel[(1,)](q)\n    return q", True),
        ("if q.requires_grad:\n        raise NotImplementedError\n    o = helper(q)\n    return o", True),
        ("return Function.apply(q)", True),
        ("return (helper(q), q)[1]", True),
        ("return q", False),
        ("if q.is_cuda:\n        kernel[(1,)](q)\n    return q", False),
        ("if not q.is_cuda:\n        return q\n    kernel[(1,)](q)", False),
        ("return helper(q) if q.is_cuda else q", False),
        ("q.is_cuda and helper(q)", False),
        ("try:\n        helper(q)\n    except RuntimeError:\n        pass\n    return q", False),
        ("with contextlib.suppress(RuntimeError):\n        helper(q)\n    return q", False),
        ("later = lambda: helper(q)\n    return q", False),
        ("return attention(q)", False),
        ("other[(1,)](q)", False),
    ],
)
def test_a_launch_counts_if_it_happens_in_each_call(body, certain):
    source = ast.parse(f"{KERNEL}def attention(q):\n    {body}\n")
    assert launches(source, "attention") is certain
    assert not launches(source, "missing")


def test_only_kernels_of_triton_count():
    text = "from numba.cuda import jit\n@jit\ndef kernel(x): ...\ndef attention(q):\n    kernel[1, 2](q)\n"
    assert not launches(ast.parse(text), "attention")
    assert launches(ast.parse(text.replace("numba.cuda", "triton")), "attention")
    assert launches(
        ast.parse(text.replace("from numba.cuda import jit", "import triton as t").replace("@jit", "@t.jit")),
        "attention",
    )


@pytest.mark.parametrize(
    ("device", "environment", "text", "lacks"),
    [
        (None, None, "", True),
        (None, "0", "", True),
        (None, "1", "", False),
        (None, None, "os.environ['TRITON_INTERPRET'] = '1'", False),
        ("nvidia0", None, "", False),
        ("kfd", None, "", False),
        ("dri/renderD128", None, "", False),
    ],
)
def test_a_gpu_or_the_interpreter_is_enough(tmp_path, monkeypatch, device, environment, text, lacks):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if environment is not None:
        monkeypatch.setenv("TRITON_INTERPRET", environment)
    devices = tmp_path / "dev"
    (devices / "dri").mkdir(parents=True)
    if device is not None:
        (devices / device).touch()
    (tmp_path / "my_triton.py").write_text(f"{KERNEL}{text}\ndef attention(q):\n    helper(q)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert lacks_gpu("my_triton", "attention", devices) is lacks
    assert not lacks_gpu("my_other", "attention", devices)
    (tmp_path / "my_other.py").write_text("def attention(q:\n")  # the import reports what is wrong
    assert not lacks_gpu("my_other", "attention", devices)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="the kernel runs on this machine's GPU")
@pytest.mark.parametrize("arguments", [("verify", "--quick"), ("benchmark", "--q-len", "64", "--head-dim", "16")])
def test_the_kernel_of_the_guide_is_told_about_the_interpreter_before_torch_is_imported(tmp_path, arguments):
    guide = (REPOSITORY / "docs" / "judge-my-kernel.md").read_text()
    (tmp_path / "tritonkernel.py").write_text(re.search(r'```python title="tritonkernel.py"\n(.*?)```', guide, re.S)[1])
    code = "import sys; from flashpoint.cli import main; print(main(), 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, *arguments, "--kernel", "tritonkernel:attention"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "needs a GPU: set TRITON_INTERPRET=1 to run it in Triton's interpreter" in " ".join(done.stderr.split())
