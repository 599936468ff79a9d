"""`install` makes `import flash_attn` work, also in models of transformers, and `uninstall` undoes it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test starts a separate process, some of them with transformers


def run(code: str, cwd: Path) -> None:
    """Run a program in a separate process, and assert that it succeeds."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr


def test_code_written_for_flash_attn_finds_it_until_it_is_uninstalled(tmp_path: Path) -> None:
    run(
        """
        import importlib.metadata, importlib.util, sys
        from flashpoint_kernels import flash_attn as ours
        ours.install()
        ours.install()  # again: nothing
        import flash_attn
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import flash_attn_with_kvcache
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb
        assert flash_attn_func is ours.flash_attn_func and flash_attn.__version__ == "2.8.3"
        assert importlib.util.find_spec("flash_attn") is not None
        try:
            importlib.metadata.version("flash_attn")
        except importlib.metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError("the metadata of a package")
        ours.uninstall()
        assert importlib.util.find_spec("flash_attn") is None
        assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
        ours.install()  # and once more
        import flash_attn.layers.rotary
        """,
        tmp_path,
    )


@pytest.mark.parametrize("imported", [True, False])
def test_it_stands_back_where_flash_attn_is_there(tmp_path: Path, imported: bool) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    run(
        f"""
        {"import flash_attn" if imported else ""}
        from flashpoint_kernels import flash_attn as ours
        try:
            ours.install()
        except RuntimeError as error:
            assert "flash_attn is {"imported" if imported else "installed"}" in str(error), error
        else:
            raise AssertionError("installed over it")
        """,
        tmp_path,
    )


MODELS = """
    import torch, transformers
    from flashpoint_kernels import flash_attn
    flash_attn.install(transformers=True)
    from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig
    sizes = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, head_dim=16,
    )
    configs = [
        LlamaConfig(**sizes), MistralConfig(**sizes, sliding_window=4),
        Gemma2Config(**sizes, sliding_window=4, attn_logit_softcapping=5.0),
    ]
"""


def test_models_of_transformers_train_and_generate_as_eager(tmp_path: Path) -> None:
    run(
        MODELS
        + """
    for config in configs:
        torch.manual_seed(0)
        ours = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16)
        eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
        eager.load_state_dict(ours.state_dict())
        tokens, mask = torch.randint(0, 100, (2, 12)), torch.ones(2, 12, dtype=torch.long)
        mask[0, :5] = 0
        seen = mask.bool()
        answers = []
        for model in (ours, eager):
            logits = model(tokens, attention_mask=mask).logits[seen].float()
            loss = torch.nn.functional.cross_entropy(logits, tokens[seen])
            loss.backward()
            gradients = torch.cat([p.grad.float().flatten() for p in model.parameters()])
            text = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
            answers.append((logits, gradients, text))
        (a, b, c), (x, y, z) = answers
        assert (a - x).abs().max() < 0.03 * x.abs().max(), config
        assert (b - y).norm() < 0.05 * y.norm(), config
        assert c.shape == z.shape
    """,
        tmp_path,
    )


def test_uninstalling_brings_the_checks_of_transformers_back(tmp_path: Path) -> None:
    run(
        MODELS
        + """
    AutoModelForCausalLM.from_config(configs[0], attn_implementation="flash_attention_2")
    flash_attn.uninstall()
    assert not transformers.utils.is_flash_attn_2_available()
    try:
        AutoModelForCausalLM.from_config(configs[0], attn_implementation="flash_attention_2")
    except ImportError as error:
        assert "flash" in str(error).lower()
    else:
        raise AssertionError("still there")
    flash_attn.install(transformers=True)
    AutoModelForCausalLM.from_config(configs[0], attn_implementation="flash_attention_2")
    """,
        tmp_path,
    )


def test_weights_of_the_softmax_are_refused_and_never_empty(tmp_path: Path) -> None:
    run(
        MODELS
        + """
    model = AutoModelForCausalLM.from_config(configs[0], attn_implementation="flash_attention_2", dtype=torch.bfloat16)
    tokens = torch.randint(0, 100, (2, 12))
    try:
        attentions = model(tokens, output_attentions=True).attentions
    except ValueError as error:
        assert str(error).startswith("output_attentions: is True, and this attention does not make"), error
    else:
        raise AssertionError(attentions)
    assert model(tokens).logits.shape == (2, 12, 100)
    flash_attn.uninstall()
    model.set_attn_implementation("eager")
    assert len(model(tokens, output_attentions=True).attentions) == 2
    """,
        tmp_path,
    )


def test_another_version_of_transformers_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    run(
        """
        import importlib.util, transformers
        transformers.__version__ = "99.0.0"
        from flashpoint_kernels import flash_attn
        try:
            flash_attn.install(transformers=True)
        except RuntimeError as error:
            assert "not 99.0.0" in str(error)
        else:
            raise AssertionError("installed")
        assert importlib.util.find_spec("flash_attn") is None
        """,
        tmp_path,
    )


REMOTE = '''
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from flash_attn import flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input


class OwnConfig(PretrainedConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    """A model that is not part of transformers, as on the Hub."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.qkv = nn.Linear(32, 96)
        self.post_init()

    def forward(self, x, mask):
        rows, indices, starts, longest, _ = unpad_input(x, mask)
        q, k, v = self.qkv(rows).view(-1, 3, 2, 16).unbind(1)
        out = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)
        return pad_input(out.flatten(1), indices, *x.shape[:2])
'''


def test_remote_code_that_imports_flash_attn_runs(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "modeling_own.py").write_text(REMOTE)
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "own", "auto_map": '
        '{"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}}'
    )
    run(
        """
        import os
        os.environ["HF_HOME"] = os.path.abspath("home")
        import torch
        from flashpoint_kernels import flash_attn
        flash_attn.install()
        from transformers import AutoConfig, AutoModel
        config = AutoConfig.from_pretrained("model", trust_remote_code=True)
        model = AutoModel.from_config(config, trust_remote_code=True)
        x, mask = torch.randn(2, 7, 32, requires_grad=True), torch.ones(2, 7, dtype=torch.bool)
        mask[1, 4:] = False
        found = model(x, mask)
        q, k, v = model.qkv(x).view(2, 7, 3, 2, 16).permute(2, 0, 3, 1, 4)
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        torch.testing.assert_close(found, exact * mask[..., None])
        found.sum().backward()
        assert x.grad[1, 4:].eq(0).all() and x.grad[0].ne(0).any()
        """,
        tmp_path,
    )
