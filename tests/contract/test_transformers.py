"""A Hugging Face model whose attention `register` cannot replace is refused; none silently computes locally."""

import importlib
import re
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
pytest.importorskip("transformers")

import torch

import flashpoint

NAME = "remote_attention_where_it_can_be"
KNOWN = {"bloom", "mpt", "falcon", "xglm", "codegen", "gptj", "gpt_neo", "rwkv", "xlnet"}
# Models that the test cannot make: they need libraries that are not installed, or have no default configuration.
WITHOUT = {"autoformer", "dab_detr", "dinat", "layoutlmv2", "omdet_turbo", "table_transformer", "conditional_detr"}


@pytest.fixture(scope="module")
def client(server):
    from flashpoint.integrations.transformers import register

    with flashpoint.Client(server.url) as client:
        register(client, NAME)
        yield client


def kinds():
    """Yield (folder, module) for each model of transformers whose attention does not use the attention interface."""
    import transformers

    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        code = file.read_text()
        if re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE) and "get_interface(" not in code:
            yield file.parent.name, file.stem


def classes(folder, file):
    """Yield (configuration, model) for the models of a file that `AutoModel` knows."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    module = importlib.import_module(f"transformers.models.{folder}.{file}")
    for configuration in MODEL_MAPPING:
        if configuration.__module__.startswith(f"transformers.models.{folder}."):
            known = MODEL_MAPPING[configuration]
            for kind in known if isinstance(known, (tuple, list)) else (known,):
                if kind.__module__ == module.__name__:
                    yield configuration, kind


def small(configuration):
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"):
        if isinstance(getattr(configuration, name, None), int):
            with suppress(NotImplementedError):
                setattr(configuration, name, 1)
    return configuration


def refused(folder, file):
    count = 0
    for configuration, kind in classes(folder, file):
        with torch.device("meta"), pytest.raises(flashpoint.InvalidInputError, match=r"computes .* itself"):
            pytest.fail(f"{kind(small(configuration(attn_implementation=NAME)))}")
        count += 1
    return count


@pytest.mark.slow
def test_models_without_the_interface_are_refused_when_they_are_made(client):
    assert sum(refused(*each) for each in kinds() if each[0] in KNOWN) >= len(KNOWN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_model_without_the_interface_is_refused(client):
    """Each such model is refused, except those in WITHOUT and two with a part whose attention can be replaced."""
    partly = {"mask2former", "oneformer"}
    assert sum(refused(*each) for each in kinds() if each[0] not in WITHOUT | partly) > 60


def test_a_model_is_refused_by_every_way_to_make_it(client, tmp_path):
    from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

    def sizes(**more):
        return BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2, **more)

    model = BloomForCausalLM(sizes()).eval()
    model.save_pretrained(tmp_path)
    for make in (
        lambda: AutoModelForCausalLM.from_config(sizes(), attn_implementation=NAME),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME),
        lambda: BloomForCausalLM(sizes(attn_implementation=NAME)),
    ):
        with pytest.raises(flashpoint.InvalidInputError, match="BloomModel computes BloomAttention itself"):
            make()
    tokens = torch.tensor([[1, 2, 3]])
    before = model(tokens).logits
    model.set_attn_implementation(NAME)  # transformers only warns, and changes no attention
    assert torch.equal(model(tokens).logits, before)


def vision_and_text(**more):
    from transformers import LlavaConfig

    text = {"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
    return LlavaConfig(text_config=text, vision_config=vision, **more)


@pytest.mark.parametrize("parts", [NAME, {"text_config": NAME}], ids=["whole", "text alone"])
def test_a_part_that_stays_local_is_named(client, parts):
    """A warning names the vision model, whose pooling calls torch's attention, unless only the text model is chosen."""
    from transformers import LlavaForConditionalGeneration

    named = pytest.warns(UserWarning, match="SiglipVisionModel computes MultiheadAttention itself")
    with named if parts == NAME else nullcontext():
        model = LlavaForConditionalGeneration(vision_and_text(attn_implementation=parts))
    assert model.config.text_config._attn_implementation == NAME
    assert (model.config.vision_config._attn_implementation == NAME) == (parts == NAME)
    if parts != NAME:
        with pytest.warns(UserWarning, match="SiglipVisionModel computes"):
            model.set_attn_implementation(NAME)


def test_a_part_without_a_place_for_another_attention_is_refused_with_what_to_do(client):
    from transformers import BlipConfig, BlipModel

    sizes = {"num_hidden_layers": 1}
    with torch.device("meta"), pytest.raises(flashpoint.InvalidInputError, match=r'BlipTextModel .*"text_config"'):
        BlipModel._from_config(BlipConfig(text_config=sizes, vision_config=sizes), attn_implementation=NAME)


@pytest.mark.parametrize(
    "name", ["sdpa", "eager", "flash_attention_2", "my_flash", "paged|mine", "owner/kernel", "", 3]
)
def test_names_that_mean_something_else_are_refused(client, name):
    from flashpoint.integrations.transformers import register

    with pytest.raises(flashpoint.InvalidInputError, match="name: is"):
        register(client, name)
