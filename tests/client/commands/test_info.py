"""`flashpoint info` describes a server and its caches."""

from tests.support.verify_answers import says


def test_info_says_what_caches_hold(run, scripted):
    usage = {"caches": 12, "bytes": 3 << 29, "limit_bytes": 4 << 30}
    scripted.script.append(says({"version": "1", "device": None, "versions": {}, "options": {}, "caches": usage}))
    code, out, _ = run("info", "--url", scripted.url)
    assert code == 0
    assert "12, 1.5 GiB; at most 4 GiB in each engine" in out
