"""Results of machines that compute with different kernels have different file names."""

import json
from pathlib import Path

import pytest

from benchmarks.record import LINE, text, write


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"device": "AMD EPYC", "kernels": "c-avx2"}, "load-amd-epyc-avx2.json"),
        ({"device": "AMD EPYC", "kernels": "c-avx512"}, "load-amd-epyc.json"),
        ({"device": "AMD EPYC", "kernels": None}, "load-amd-epyc.json"),
        ({"device": "Intel(R) Xeon(R) Processor", "kernels": "c-amx"}, "load-intel-r-xeon-r-processor.json"),
        ({"device": "NVIDIA H200"}, "load-nvidia-h200.json"),
    ],
)
def test_the_name_has_the_device_and_whether_it_lacks_avx_512(
    environment: dict[str, str], name: str, tmp_path: Path
) -> None:
    write(tmp_path, "load", {"environment": environment})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert json.loads((tmp_path / name).read_text()) == {"environment": environment}


def test_a_row_of_a_result_is_one_line() -> None:
    rows = [{"name": f"é {n}", "values": [n, None, 0.5], "nested": {"empty": []}} for n in range(40)]
    result = {"device": "CPU", "rows": rows, "by_name": {"one": rows, "none": {}}, "long": ["x" * LINE, ()]}
    written = text(result)
    assert json.loads(written) == {**result, "long": ["x" * LINE, []]}
    lines = written.splitlines()
    assert lines[:4] == ["{", ' "device": "CPU",', ' "rows": [', f"  {json.dumps(rows[0], ensure_ascii=False)},"]
    assert len(lines) == 2 + 1 + (2 + len(rows)) + (2 + 2 + len(rows) + 1) + 4
    assert text({}) == "{}\n"
