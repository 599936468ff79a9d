"""A command with wrong arguments, or whose request fails, ends with the right exit code and message."""

import pytest

GRID = ("--q-len", "64", "--head-dim", "16")


def test_every_command_helps_with_examples(run):
    for command in ("verify", "benchmark", "info"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert f"  flashpoint {command} " in out
        assert "Exit codes: 0 right, 1 wrong or failed, 2 called wrongly" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("benchmark", "--q-len", "64"), "--q-len, --head-dim: give both for a grid, or give a --preset"),
        (("benchmark", "--q-len", "x", "--head-dim", "16"), "--q-len: must be integers, with a comma between two"),
        (
            ("benchmark", "--q-len", "64,,128", "--head-dim", "16"),
            "--q-len: must be integers, with a comma between two",
        ),
        (("benchmark", "--preset", "papers", "--q-len", "3"), "--preset: has its own shapes"),
        (("benchmark", "--preset", "papers", "--batch", "2"), "--preset: has its own shapes"),
        (("benchmark", *GRID, "--dtype", "int8"), "--dtype"),
        (("benchmark", *GRID, "--preset", "papers"), "--preset: has its own shapes"),
        (("benchmark", "--preset", "papers", "--dtype", "float16"), "the preset has its own dtypes"),
        (("benchmark", *GRID, "--plot", "a.gif"), ".svg or .png"),
        (("benchmark", *GRID, "--nonsense"), "--nonsense: unknown option"),
        (("info", "--url", "localhost:18100"), "url: must begin with http:// or https://"),
        (("info", "--url", "http://localhost:18100", "--timeout", "1e9"), "timeout: must be a number of seconds"),
        (("verify", "--q-len", "8"), "or give a FILE"),
        (("verify", "no-such-file"), "no-such-file"),
    ],
)
def test_what_is_called_wrongly_ends_with_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_server_that_is_not_there_ends_with_3(run, scripted):
    scripted.script.extend([lambda h: h.problem(503, Retry_After="61")] * 9)
    code, out, err = run("info", "--url", scripted.url, "--timeout", "60")
    assert (code, out) == (3, "")
    assert err.startswith("flashpoint info: 503 some_code")


def test_a_refusal_ends_with_2_and_a_fault_with_1(run, scripted):
    for status, expected in ((422, 2), (401, 2), (413, 2), (500, 1)):
        scripted.script.append(lambda h, status=status: h.problem(status))
        assert run("verify", "--q-len", "8", "--head-dim", "4", "--url", scripted.url)[0] == expected
