"""The judge's report fits its published schema; the report's text, files and CI workflow are right."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from torch import Tensor

import flashpoint_kernels
from flashpoint_contract.judging import REQUIREMENTS, Failure, Race, Report, schema
from flashpoint_kernels import judging
from flashpoint_kernels.judging import cases, dropping, relations
from tests.judge.corpus import RIGHT, WRONG
from tests.judge.right import formula_in_float32
from tests.judge.small import SMALL, judged, late

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["no_maximum", "formula_in_float32"])
def test_a_report_is_valid_by_the_schema(name: str) -> None:
    function = WRONG[name].function if name in WRONG else formula_in_float32
    document = json.loads(json.dumps(judged(function).to_dict(), allow_nan=False))
    jsonschema.validate(document, schema())
    assert document["ok"] == (name not in WRONG)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"verdict": "perhaps"}, schema())


def test_the_counts_are_of_cases_alone() -> None:
    report = judged(late)
    lines = report.lines()
    assert lines[0] == lines[-1] == f"FAIL: wrong: {report.failed} of {report.cases} cases fail"
    assert f"{report.causes[0].explains} of {report.failed} failing cases]" in lines[1]
    assert lines[2].startswith("smallest failing case: float32 ")
    about = f"tests.judge.small:late · bhsd · cpu · {report.cases} cases judged · "
    assert any(line.startswith(about) for line in lines)
    assert report.causes[0].explains <= report.failed == len(report.failures)
    assert str(report) == "\n".join(lines)


def in_numpy(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return RIGHT["formula_in_float32"](q, k, v).numpy()


def test_a_kernel_in_numpy_is_told_what_to_return() -> None:
    lines = judged(in_numpy).lines()
    assert "nothing was judged" in lines
    assert "  hint: return torch.from_numpy(o), or judge a file that flashpoint.save_case writes" in lines


def test_the_rate_of_races_is_said_of_the_calls() -> None:
    report = Report(**(vars(judged(formula_in_float32)) | {"race": Race(1474, 0.0031)}))
    said = "1474 repeated calls; a race in 0.31% of calls or more would have shown (99%)"
    assert f"no race in {said}" in report.lines()
    race = Failure("repeated calls", "", {}, "the bits of the forward differ from call to call")
    assert said in replace(report, failures=(race,)).lines()


def float32_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.dtype != torch.float32:
        raise NotImplementedError("float32 alone")
    return RIGHT["formula_in_float32"](q, k, v)  # type: ignore[no-any-return]


def test_what_all_lacks_is_said() -> None:
    report = flashpoint_kernels.judge(float32_alone, quick=True, only=SMALL, require=("all",))
    assert report.lines()[-1].startswith(
        "FAIL: every error is within its bound, but not every option and data type was accepted: bfloat16 ("
    )


@pytest.mark.slow
def test_a_requirement_that_is_lacking_fails() -> None:
    assert judged(formula_in_float32).ok
    report = flashpoint_kernels.judge(
        formula_in_float32, quick=True, dtype="float32", seed=0, require=("masked-nan",), seconds=20
    )
    assert not report.ok
    assert "masked-nan" in report.lines()[-1]
    with pytest.raises(judging.UnusableError, match="require must be one of"):
        judged(formula_in_float32, require=("speed",))


def test_progress_names_the_stage_and_may_end_the_judgement() -> None:
    seen: list[judging.Progress] = []

    def told(at: judging.Progress) -> None:
        seen.append(at)
        if len(seen) == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        judged(formula_in_float32, progress=told)
    assert [at.done for at in seen] == sorted(at.done for at in seen)
    assert seen[0].total >= 5
    assert "values" in seen[0].stage


def test_the_workflow_calls_commands_that_there_are() -> None:
    """The example workflow, which kernel projects copy, uses flags that exist, and uploads the report."""
    text = (ROOT / "examples/workflows/judge-attention.yml").read_text()
    workflow = yaml.safe_load(text)
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    page = (ROOT / "docs/cli.md").read_text()
    flags = set(re.findall(r"--[\w-]+", page))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 30
        steps = [step for step in job["steps"] if "flashpoint verify" in step.get("run", "")]
        assert len(steps) == 1
        words = shlex.split(steps[0]["run"])
        assert words[:4] == ["flashpoint", "verify", "--kernel", "$KERNEL"]
        assert {word for word in words if word.startswith("--")} <= flags
        report_path = next(step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
        assert {words[words.index(flag) + 1] for flag in ("--json", "--save")} == set(report_path.split())
    assert set(REQUIREMENTS) >= {"accurate", "deterministic"}


def test_a_data_type_or_a_requirement_may_be_one_word_or_several() -> None:
    reports = [
        flashpoint_kernels.judge(formula_in_float32, quick=True, only=SMALL, dtype=dtype, require=require)
        for dtype, require in (("bfloat16", "accurate"), (["bfloat16"], ["accurate"]))
    ]
    assert [(report.dtypes, report.ok) for report in reports] == 2 * [(("bfloat16",), True)]
    with pytest.raises(judging.UnusableError, match="dtype must be one of"):
        flashpoint_kernels.judge(formula_in_float32, dtype="half")
    with pytest.raises(judging.UnusableError, match="dtype must be one of"):
        flashpoint_kernels.judge(formula_in_float32, dtypes=("half",))  # the name of `dtype` before 0.3


def without_some_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = RIGHT["formula_in_float32"](q, k, v)
    return o.detach() if q.detach().abs().max() > 20 else o  # type: ignore[no-any-return]


def without_some_answers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.detach().abs().max() > 20:
        raise ValueError("too large")
    return RIGHT["formula_in_float32"](q, k, v)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (without_some_gradients, "o has no gradient, though it has one with other values"),
        (without_some_answers, "too large, though it accepts this shape, type and options with other values"),
    ],
)
def test_what_is_missing_with_some_values_is_wrong(function: Any, said: str) -> None:
    report = judged(function)
    assert report.verdict == "wrong"
    assert said in str(report)


def imprecise_and_wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = RIGHT["formula_in_the_type"](q, k, v)
    return o * 2 if q.detach().abs().max() > 20 else o  # type: ignore[no-any-return]


def test_a_wrong_function_that_is_imprecise_elsewhere_is_wrong() -> None:
    report = judged(imprecise_and_wrong, dtype="bfloat16")
    assert report.imprecise
    assert (report.verdict, report.ok) == ("wrong", False)


CALLS: list[None] = []


def other_bits_in_short_calls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = RIGHT["formula_in_float32"](q, k, v)
    CALLS.append(None)
    short = q.shape[2] == 8 and len(CALLS) % 2
    return o.nextafter(torch.tensor(torch.inf)) if short else o  # type: ignore[no-any-return]


def test_bits_that_differ_in_one_shape_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge runs two of its cases here, and of its relations little more than the repeated calls."""
    listed = cases.listed
    monkeypatch.setattr(cases, "listed", lambda *given, **how: listed(*given, **how)[:2])
    for name in ("purity", "other_derivatives", "compiled"):
        monkeypatch.setattr(relations, name, lambda *_: ())
    monkeypatch.setattr(dropping, "dropout", lambda *_: ())
    report = flashpoint_kernels.judge(other_bits_in_short_calls, quick=True, dtype="float32", seed=0)
    assert [p.standing for p in report.properties if p.name == "deterministic"] == ["fails"]
    assert "the bits of the forward differ from call to call" in str(report)
    assert not report.ok


def test_a_required_property_that_was_not_tested_fails() -> None:
    report = judged(formula_in_float32, require=("deterministic",))  # one case: no call is repeated
    assert [p.standing for p in report.properties if p.name == "deterministic"] == ["not tested"]
    assert not report.ok


@pytest.mark.parametrize(("name", "dtype"), [("too_large_in_float16", "float16"), ("too_large_by_25", "bfloat16")])
def test_a_factor_that_hides_in_the_rounding_is_found(name: str, dtype: str) -> None:
    sizes = {"q_heads": 4, "kv_heads": 2, "q_len": 64, "kv_len": 96, "head_dim": 64}
    report = judged(WRONG[name].function, only=sizes, dtype=dtype)
    assert report.verdict == "wrong"
    assert {failure.relation for failure in report.failures} == {"gain"}
