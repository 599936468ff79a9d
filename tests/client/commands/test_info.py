"""`flashpoint info` describes a server and its caches."""

import pytest

from tests.support.verify_answers import says


def test_info_says_what_caches_hold(run, scripted):
    usage = {"caches": 12, "bytes": 3 << 29, "limit_bytes": 4 << 30}
    scripted.script.append(says({"version": "1", "device": None, "versions": {}, "options": {}, "caches": usage}))
    code, out, _ = run("info", "--url", scripted.url)
    assert code == 0
    assert "12, 1.5 GiB; at most 4 GiB in each engine" in out


@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("value", ["0", "1", "²", "-5", "", "99999999999999999999"])
def test_a_size_of_the_terminal_that_makes_no_sense_hides_nothing(run, scripted, monkeypatch, name, value):
    usage = {"caches": 12, "bytes": 3 << 29, "limit_bytes": 4 << 30}
    answer = says({"version": "1", "device": None, "versions": {}, "options": {}, "caches": usage})
    scripted.script.extend([answer, answer])
    _, whole, _ = run("info", "--url", scripted.url)
    monkeypatch.setenv(name, value)
    code, out, err = run("info", "--url", scripted.url)
    assert (code, err) == (0, "")
    assert "".join(out.split()) == "".join(whole.split())
    assert len(out.splitlines()) < 2 * len(whole.splitlines())
