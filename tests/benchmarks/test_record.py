"""Results of different processors have different file names, also where a host calls them all by one name."""

import json
import platform
import re
from pathlib import Path

import pytest

from benchmarks.record import LINE, environment, text, write


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"device": "AMD EPYC (family 25, model 17)"}, "load-amd-epyc-family-25-model-17.json"),
        ({"device": "AMD EPYC"}, "load-amd-epyc.json"),
        ({"device": "Intel(R) Xeon(R) Processor"}, "load-intel-r-xeon-r-processor.json"),
        ({"device": "NVIDIA H200"}, "load-nvidia-h200.json"),
    ],
)
def test_the_name_has_the_device(environment: dict[str, str], name: str, tmp_path: Path) -> None:
    write(tmp_path, "load", {"environment": environment})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert json.loads((tmp_path / name).read_text()) == {"environment": environment}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have neither")
def test_the_device_of_a_cpu_has_family_and_model() -> None:
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text().partition("\n\n")[0], re.M))
    expected = f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
    assert environment()["device"] == expected


def test_a_row_of_a_result_is_one_line() -> None:
    rows = [{"name": f"é {n}", "values": [n, None, 0.5], "nested": {"empty": []}} for n in range(40)]
    result = {"device": "CPU", "rows": rows, "by_name": {"one": rows, "none": {}}, "long": ["x" * LINE, ()]}
    written = text(result)
    assert json.loads(written) == {**result, "long": ["x" * LINE, []]}
    lines = written.splitlines()
    assert lines[:4] == ["{", ' "device": "CPU",', ' "rows": [', f"  {json.dumps(rows[0], ensure_ascii=False)},"]
    assert len(lines) == 2 + 1 + (2 + len(rows)) + (2 + 2 + len(rows) + 1) + 4
    assert text({}) == "{}\n"
