"""The models have the metadata and the configuration that the Open Inference Protocol demands."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

from tests.support.oip.message import call

MODELS = {"attention": ("o", "lse"), "attention_grad": ("dq", "dk", "dv", "dattn_mask", "dsinks")}


@pytest.mark.parametrize("model", MODELS)
def test_model_metadata_and_configuration(url, model):
    about = call(url, "GET", f"/v2/models/{model}").head
    assert about["name"] == model
    assert call(url, "GET", f"/v2/models/{model}/versions/{about['versions'][0]}").head == about
    inputs = {tensor["name"]: tensor for tensor in about["inputs"]}
    assert {"q", "k", "v", "attn_mask", "kv_lengths", "cu_seqlens_q", "alibi_slopes", "sinks"} <= inputs.keys()
    assert ("do" in inputs) == (model == "attention_grad")
    assert inputs["q"]["shape"] == [-1, -1, -1, -1]
    assert inputs["q"]["datatype"] == "FP32"
    assert inputs["cu_seqlens_q"]["datatype"] in ("INT32", "INT64")
    assert {tensor["name"] for tensor in about["outputs"]} == set(MODELS[model])
    config = call(url, "GET", f"/v2/models/{model}/config").head
    assert config["name"] == model
    assert {tensor["name"]: tensor["dims"] for tensor in config["input"]} == {
        name: tensor["shape"] for name, tensor in inputs.items()
    }
    assert {tensor["name"] for tensor in config["input"] if not tensor["optional"]} == {
        *"qkv", *(["do"] if model == "attention_grad" else [])
    }  # fmt: skip
