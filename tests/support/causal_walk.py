"""Compare the attention of `register` with `eager`, in models of transformers and seven situations.

    .venv/bin/python -m tests.support.causal_walk docs/reference/transformers-models.md

walks every model that builds small, in some minutes, and writes the table.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.causal_models import VOCABULARY, build, small_config

LENGTH = 20
LIMIT = 1e-3  # largest error of a logit or gradient, relative to the largest one; float32
SITUATIONS = ("prefill", "generate", "static cache", "logits_to_keep", "left padding", "packed positions", "training")


# Models with an attention of their own kind that only the mappings with images or speech have.
OF_OTHER_MAPPINGS = ("mistral_large4", "glm5_next", "speech_to_text")


def kinds() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return each language model of transformers: name -> function that returns its class and its configuration's."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, Callable[[], tuple[Any, Any]]] = {}
    for suffix, names, mapping, only in (
        ("", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING, None),
        (" (encoder and decoder)", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
         auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, None),
        ("", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
         OF_OTHER_MAPPINGS),
        ("", auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, OF_OTHER_MAPPINGS),
    ):  # fmt: skip

        def load(name: str, mapping: Any = mapping) -> tuple[Any, Any]:
            config = CONFIG_MAPPING[name]
            kind = mapping[config]
            return kind[0] if isinstance(kind, tuple) else kind, config

        found |= {name + suffix: partial(load, name) for name in names if only is None or name in only}
    return found


def made(kind: Any, config: Any) -> Any:
    """Return a small model that has answered one call with eager attention."""
    model = build(kind, small_config(config()))
    with torch.no_grad():
        model(**_inputs(model, _tokens()))
    return model


def row(load: Callable[[], tuple[Any, Any]], name: str, refusals: tuple[type[Exception], ...]) -> list[str]:
    """Return the outcome of each situation; or, for a model that is not built, why not."""
    try:
        model = made(*load())
    except Exception as error:
        return [f"not built: {type(error).__name__}: {_sentence(error)}"]
    return list(outcomes(model, name, refusals).values())


def table(rows: dict[str, list[str]]) -> str:
    """Return the page with the table of models and situations."""
    import transformers

    lines = [
        "# Models of transformers beside eager attention", "",
        f"Each language model of transformers {transformers.__version__} that builds small, with random weights,",
        "beside `eager` in seven situations. `tests/support/causal_walk.py` writes this page; a test compares it.", "",
        "- *equal*: logits, and gradients in training, differ by less than 0.1% of the largest.",
        "- *refused*: the model, or the call, raises an error or keeps its own attention.",
        "- *–*: `eager` raises an error in this situation, too.", "",
        f"| model | {' | '.join(SITUATIONS)} |", "|---" * (len(SITUATIONS) + 1) + "|",
    ]  # fmt: skip
    built = {model: cells for model, cells in rows.items() if len(cells) > 1}
    lines += [f"| {model} | {' | '.join(map(_word, cells))} |" for model, cells in built.items()]
    lines += ["", "## Refused", ""]
    for model, cells in built.items():
        refused = [cell.removeprefix("refused: ").partition(". ")[0] for cell in cells if cell.startswith("refused")]
        if refused:
            lines.append(f"- {model}: {'; '.join(dict.fromkeys(refused))}")
    lines += ["", "## Not built", ""]
    lines += [f"- {model}: {cells[0].removeprefix('not built: ')}" for model, cells in rows.items() if len(cells) == 1]
    return "\n".join(lines) + "\n"


def _word(outcome: str) -> str:
    return "–" if outcome.startswith("not with eager") else outcome.split(":", 1)[0]


def outcomes(model: Any, name: str, refusals: tuple[type[Exception], ...]) -> dict[str, str]:
    """Return an outcome for each of SITUATIONS: `equal`, `refused: …`, `not with eager: …`; or what is wrong."""
    return {situation: outcome(model, name, situation, refusals) for situation in SITUATIONS}


def outcome(model: Any, name: str, situation: str, refusals: tuple[type[Exception], ...]) -> str:
    ask = _ASK[situation]
    model.set_attn_implementation("eager")
    try:
        true = _run(ask, model)
    except Exception as error:
        return f"not with eager: {_sentence(error)}"
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name and not _parts(model, name):
            return "refused: transformers keeps the model's own attention, and warns"
        ours = _run(ask, model)
    except refusals as error:
        return f"refused: {_sentence(error)}"
    except Exception as error:
        return f"FAILS: {type(error).__name__}: {_sentence(error)}"
    finally:
        model.set_attn_implementation("eager")
        model.eval()
    if ours.keys() != true.keys():
        return f"WRONG: {sorted(ours.keys() ^ true.keys())[:3]} on one side only"
    worst = max(((_error(ours[each], true[each]), each) for each in true), default=(0.0, ""))
    return "equal" if worst[0] <= LIMIT else f"WRONG: {worst[1]} by {worst[0]:.2g}"


def _parts(model: Any, name: str) -> bool:
    return any(
        getattr(each.config, "_attn_implementation", None) == name
        for each in model.modules()
        if hasattr(each, "config")
    )


def _run(ask: Callable[[Any], dict[str, Tensor]], model: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ask(model)


def _error(ours: Tensor, true: Tensor) -> float:
    if ours.shape != true.shape:
        return float("inf")
    both = ours.isfinite() & true.isfinite()
    if not torch.equal(ours[~both].nan_to_num(nan=7.0), true[~both].nan_to_num(nan=7.0)):
        return float("inf")
    true, ours = true[both].double(), ours[both].double()
    return float((ours - true).abs().max() / true.abs().max().clamp(min=1e-6)) if len(true) else 0.0


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _inputs(model: Any, tokens: Tensor, **more: Any) -> dict[str, Any]:
    """Return the arguments of a call with these tokens, for a decoder alone or an encoder and a decoder."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": tokens, **more}
    inputs: dict[str, Any] = {"input_ids": tokens, "decoder_input_ids": tokens.flip(1), **more}
    if model.main_input_name == "input_features":
        channels = getattr(model.config, "input_feat_per_channel", None) or model.config.num_mel_bins
        del inputs["input_ids"]
        inputs["input_features"] = torch.randn(
            len(tokens), 4 * LENGTH, channels, generator=torch.Generator().manual_seed(2)
        )
    return inputs


def _tokens(rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY - 10, (rows, LENGTH), generator=generator)


@torch.no_grad()
def _prefill(model: Any) -> dict[str, Tensor]:
    return {"logits": model(**_inputs(model, _tokens())).logits}


@torch.no_grad()
def _generate(model: Any, **how: Any) -> dict[str, Tensor]:
    tokens = _tokens(1)
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id, config.pad_token_id = None, 0
    if model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        config.decoder_start_token_id = 0
    inputs = _inputs(model, tokens, attention_mask=torch.ones_like(tokens))
    if "input_features" in inputs:
        del inputs["attention_mask"]
    inputs.pop("decoder_input_ids", None)
    answer = model.generate(
        **inputs, generation_config=config, max_new_tokens=5, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **how,
    )  # fmt: skip
    return {"logits": torch.stack(answer.logits)}


def _static(model: Any) -> dict[str, Tensor]:
    return _generate(model, cache_implementation="static")


@torch.no_grad()
def _last(model: Any) -> dict[str, Tensor]:
    return {f"last {count}": model(**_inputs(model, _tokens(), logits_to_keep=count)).logits for count in (1, 3)}


@torch.no_grad()
def _padded(model: Any) -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :7] = 0
    logits = model(**_inputs(model, _tokens(), attention_mask=mask)).logits
    return {"logits": logits if model.config.is_encoder_decoder else logits[:, -LENGTH:][mask.bool()]}


@torch.no_grad()
def _packed(model: Any) -> dict[str, Tensor]:
    positions = torch.cat((torch.arange(8), torch.arange(LENGTH - 8)))[None]
    return {"logits": model(**_inputs(model, _tokens(1), position_ids=positions, use_cache=False)).logits}


def _training(model: Any) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    tokens = _tokens()
    out = model(**_inputs(model, tokens, labels=tokens))
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    largest = max((float(each.abs().max()) for each in gradients.values()), default=0.0)
    # a gradient that is 0 but for rounding says nothing
    gradients = {name: each for name, each in gradients.items() if each.abs().max() > 1e-5 * largest}
    return {"logits": out.logits.detach(), **gradients}


_ASK: dict[str, Callable[[Any], dict[str, Tensor]]] = dict(
    zip(SITUATIONS, (_prefill, _generate, _static, _last, _padded, _packed, _training), strict=True)
)


if __name__ == "__main__":
    from flashpoint_kernels import ProblemError
    from flashpoint_kernels.transformers import NAME, register

    register()
    torch.set_num_threads(1)  # the models are tiny
    Path(sys.argv[1]).write_text(table({model: row(load, NAME, (ProblemError,)) for model, load in kinds().items()}))
