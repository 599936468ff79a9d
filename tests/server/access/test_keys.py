"""API keys, their file, their permissions and their limits work as documented."""

import contextlib
import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from flashpoint.cli import main
from flashpoint_server.access import limits
from flashpoint_server.access.admission import Admission
from flashpoint_server.access.keys import ANYONE, Keyring
from flashpoint_server.access.limits import BURST, Quota, Spent
from flashpoint_server.config.key_file import KeyEntry, read
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.price import Price
from flashpoint_server.refusal import Refusal


def ring(**settings):
    return Keyring(Settings(**settings))


def status(keyring, authorization, right="attention"):
    try:
        keyring.find({} if authorization is None else {"authorization": authorization}).use(right)
    except Refusal as refusal:
        return refusal.status
    return 200


def sha256(key):
    return hashlib.sha256(key.encode()).hexdigest()


def keys_file(path, **entries):
    """Write a key file and return its path; the key of an entry is its name twice."""
    tables = {name: {"sha256": sha256(name * 2), "rights": ["attention"], **fields} for name, fields in entries.items()}
    path.write_text(
        "".join(
            f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in fields.items())
            for name, fields in tables.items()
        )
    )
    return path


def test_without_keys_all_may_do_all():
    keyring = ring()
    assert not keyring.locked
    assert keyring.find({}) is ANYONE
    assert status(keyring, None, "admin") == 200


@pytest.mark.parametrize(
    ("authorization", "right", "expected"),
    [
        (None, "info", 401),
        ("Bearer", "info", 401),
        ("Bearer nobody", "info", 401),
        ("Basic first", "info", 401),
        ("Bearer first", "attention", 200),
        ("Bearer first", "admin", 200),
        ("bearer  first ", "attention", 200),
        ("Bearer look", "info", 200),
        ("Bearer look", "attention", 403),
        ("Bearer look:info", "info", 401),
        ("Bearer both", "attention", 200),
        ("Bearer schlüssel", "info", 401),
    ],
)
def test_rights(authorization, right, expected):
    assert status(ring(api_keys="first,look:info,both:attention+info"), authorization, right) == expected


def test_what_is_refused_tells_nothing():
    """An error shows neither whether the key is known nor which permission is missing."""
    keyring = ring(api_keys="look:info")
    unknown = set()
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic look"}, {"authorization": "Bearer"}):
        with pytest.raises(Refusal) as caught:
            keyring.find(headers)
        unknown.add((caught.value.code, caught.value.detail, *caught.value.headers.items()))
    assert len(unknown) == 1
    caller = keyring.find({"authorization": "Bearer look"})
    forbidden = set()
    for right in ("attention", "admin", "metrics"):
        with pytest.raises(Refusal) as caught:
            caller.use(right)
        forbidden.add((caught.value.code, caught.value.detail))
        assert right not in caught.value.detail
    assert len(forbidden) == 1


def test_keys_come_comma_separated_and_are_not_shown(monkeypatch):
    monkeypatch.setenv("FLASHPOINT_API_KEYS", "s3cret, tok/en+=:info,")
    settings = Settings()
    assert [key.get_secret_value() for key in settings.api_keys] == ["s3cret", "tok/en+=:info"]
    assert "s3cret" not in repr(settings)
    assert Keyring(settings).find({"authorization": "Bearer tok/en+="}).name == "key-2"


@pytest.mark.parametrize("keys", ["with space", "s3cret:all", "s3cret:", ":info", "s3cret:info+"])
def test_a_wrong_key_setting_is_refused_without_being_shown(keys):
    with pytest.raises(ValidationError) as caught:
        Settings(api_keys=keys)
    assert "key 1 must be" in str(caught.value)
    assert keys not in str(caught.value)  # a program that embeds the server may log the error


def test_keys_of_a_file_have_names_rights_and_limits(tmp_path):
    path = keys_file(tmp_path / "keys.toml", alice={}, bob={"rights": ["info", "metrics"], "concurrent": 2})
    keyring = ring(api_keys="plain", api_keys_file=path)
    assert [keyring.find({"authorization": f"Bearer {key}"}).name for key in ("alicealice", "bobbob", "plain")] == [
        "alice", "bob", "key-1",
    ]  # fmt: skip
    assert status(keyring, "Bearer alicealice") == 200
    assert status(keyring, "Bearer bobbob") == 403
    assert status(keyring, "Bearer bobbob", "metrics") == 200
    assert status(keyring, f"Bearer {sha256('alicealice')}") == 401  # the hash is no key


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("", "contains no keys"),
        ("[alice", "not TOML"),
        ("\xff", "not UTF-8"),
        ('[alice]\nrights = ["info"]', r"alice\.sha256"),
        ('[alice]\nsha256 = "s3cret"\nrights = ["info"]', r"alice\.sha256"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["all"]', r"alice\.rights"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = []', r"alice\.rights"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nrequest_per_second = 1', "request_per_second"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nconcurrent = 0', "concurrent"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nbytes_per_second = inf', "bytes_per_second"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nconcurrent = true', "concurrent"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nflops_per_second = "9"', "flops_per_second"),
        (f'["../alice"]\nsha256 = "{"0" * 64}"\nrights = ["info"]', "the name of a key"),
        ("alice = 1", "alice"),
    ],
)
def test_a_file_that_is_not_right_is_refused_and_no_value_is_shown(tmp_path, text, why):
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=why) as caught:
        read(path)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ValidationError, match="api_keys_file"):
        Settings(api_keys_file=path)


def test_names_and_keys_are_one_to_one(tmp_path):
    path = keys_file(tmp_path / "keys.toml", alice={}, bob={"sha256": sha256("alicealice")})
    with pytest.raises(ValueError, match="the same key"):
        ring(api_keys_file=path)
    keys_file(path, **{"key-1": {}})
    with pytest.raises(ValueError, match="key-1"):
        ring(api_keys="other", api_keys_file=path)


def test_a_reload_takes_what_is_new_and_keeps_all_where_the_file_is_wrong(tmp_path):
    path = keys_file(tmp_path / "keys.toml", alice={}, bob={})
    keyring = ring(api_keys_file=path)
    keys_file(path, bob={"rights": ["info"]}, carol={})
    keyring.reload()
    assert [status(keyring, f"Bearer {name * 2}") for name in ("alice", "bob", "carol")] == [401, 403, 200]
    for wrong in ("", "[", "[alice]"):
        path.write_text(wrong)
        keyring.reload()
        assert [status(keyring, f"Bearer {name * 2}") for name in ("alice", "bob", "carol")] == [401, 403, 200]
    path.unlink()
    keyring.reload()
    assert status(keyring, "Bearer carolcarol") == 200


def test_what_a_key_has_used_outlasts_a_reload(tmp_path):
    path = keys_file(tmp_path / "keys.toml", alice={"requests_per_second": 0.001})
    keyring = ring(api_keys_file=path)
    assert [status(keyring, "Bearer alicealice") for _ in range(2)] == [200, 429]
    keys_file(path, alice={"requests_per_second": 0.002})
    keyring.reload()
    assert status(keyring, "Bearer alicealice") == 429


def quota(shared=WorkerGroup(), **limits):  # noqa: B008
    return Quota(KeyEntry(sha256="0" * 64, rights={"attention"}, **limits), Spent("alice", shared))


def refused(call, *args):
    with pytest.raises(Refusal) as caught:
        call(*args)
    assert (caught.value.status, caught.value.code) == (429, "key_limit")
    return int(caught.value.headers["Retry-After"])


@pytest.fixture
def clock(monkeypatch):
    """Return a stopped clock for the limits; its time is `clock.now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_requests_by_the_second(clock):
    """A key first gets one second's worth of its rate, then more as time passes."""
    limited = quota(requests_per_second=64)
    for _ in range(64 * int(BURST)):
        limited.take("requests", 1)
    assert refused(limited.take, "requests", 1) == 1
    for _ in range(100):
        clock.now += 1 / 64
        limited.take("requests", 1)
        refused(limited.take, "requests", 1)
    clock.now += 1000
    for _ in range(64 * int(BURST)):
        limited.take("requests", 1)
    refused(limited.take, "requests", 1)


def test_a_big_request_is_let_in_and_paid_for_by_the_next(clock):
    limited = quota(bytes_per_second=1000, flops_per_second=10, compute_seconds_per_second=0.1)
    with Admission(Settings()).permit(60_000, limited) as permit:
        permit.charge(Price(5, 0.0))
        assert refused(limited.enter, 1) == 59
        permit.charge(Price(25, 0.0))
        assert refused(permit.charge, Price(1, 0.0)) == 2
        clock.now += 58.5
        assert refused(limited.enter, 1) == 1
        permit.charge(Price(1, 0.0))


def test_computing_is_limited_in_predicted_seconds_and_what_was_not_needed_is_given_back(clock):
    limited = quota(compute_seconds_per_second=0.5)
    with Admission(Settings()).permit(0, limited) as permit:
        permit.charge(Price(10, 30.0))
        assert refused(permit.charge, Price(1, 0.1)) == 59  # a bucket holds one second's worth
        permit.correct(Price(10, 3.0))
        assert refused(permit.charge, Price(1, 0.1)) == 5
        clock.now += 5.1
        permit.charge(Price(1, 0.1))


def test_a_price_that_one_limit_refuses_is_not_charged_to_the_other(clock):
    limited = quota(flops_per_second=10, compute_seconds_per_second=0.1)
    with Admission(Settings()).permit(0, limited) as permit:
        permit.charge(Price(5, 30.0))
        refused(permit.charge, Price(25, 0.1))
        permit.correct(Price(5, 0.0))
        permit.charge(Price(1, 0.1))


def test_requests_at_once_are_counted_until_they_have_left():
    limited, admission = quota(concurrent=2), Admission(Settings())
    with admission.permit(1, limited):
        with admission.permit(1, limited):
            assert refused(admission.permit, 1, limited) == 1
            assert (admission.requests, admission.bytes) == (2, 2)
        with admission.permit(1, limited):
            pass


def test_what_the_queue_refuses_costs_the_key_nothing():
    limited, admission = quota(bytes_per_second=1), Admission(Settings(queue_limit=1))
    with admission.permit(1), pytest.raises(Refusal, match="queue is full"):
        admission.permit(1000, limited)
    limited.enter(1)


TAKER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from flashpoint_server.access import limits
from flashpoint_server.config.key_file import KeyEntry
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.access.limits import Quota, Spent
from flashpoint_server.refusal import Refusal
limits.time = SimpleNamespace(monotonic=lambda: 1000.0)  # nothing comes back, and nobody waits too long for the lock
entry = KeyEntry(sha256="0" * 64, rights={"attention"}, requests_per_second=0.5, flops_per_second=1 << 14)
quota = Quota(entry, Spent("alice", WorkerGroup(Path(sys.argv[1]), int(sys.argv[2]))))
quota.enter(0)
print("inside", flush=True)
sys.stdin.readline()
def taken(what):
    count = 0
    try:
        while True:
            quota.take(what, 1)
            count += 1
    except Refusal:
        return count
print(taken("requests"), taken("flops"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def takers(tmp_path):
    """Start three processes that take at the same time."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as running:

        def taker(number):
            process = subprocess.Popen([sys.executable, "-c", TAKER, tmp_path, str(number)], **pipes)
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield [taker(number) for number in range(3)]


def test_processes_share_one_limit_and_the_next_one_does_not_inherit_a_dead_ones_requests(takers, tmp_path):
    """Within one second, three processes share the limit of one key: a request and 16,384 FLOPs."""
    for taker in takers:
        assert taker.stdout.readline() == "inside\n"
    here = Spent("alice", WorkerGroup(tmp_path, 3))
    assert sum(here.numbers[3:]) == 3
    for taker in takers:
        taker.stdin.write("\n")
        taker.stdin.flush()
    taken = [[int(count) for count in taker.stdout.readline().split()] for taker in takers]
    assert [sum(counts) for counts in zip(*taken, strict=True)] == [1, 1 << 14]
    for taker in takers:
        taker.kill()
        taker.communicate()
    assert sum(here.numbers[3:]) == 3  # the processes died holding them
    for n in range(3):
        Spent("alice", WorkerGroup(tmp_path, n))
    assert sum(here.numbers[3:]) == 0


def test_a_process_that_stopped_with_the_lock_stops_no_other(tmp_path):
    one, other = (Spent("alice", WorkerGroup(tmp_path, n)) for n in range(2))
    limited = Quota(KeyEntry(sha256="0" * 64, rights={"attention"}, requests_per_second=9), other)
    with one.locked():
        assert refused(limited.take, "requests", 1) == 1
    limited.take("requests", 1)


def test_the_command_draws_a_key_for_the_file(tmp_path, capsys):
    assert main(["key", "alice", "--rights", "attention+info", "--concurrent", "3", "--flops-per-second", "1e12"]) == 0
    out, err = capsys.readouterr()
    path = tmp_path / "keys.toml"
    path.write_text(out)
    key = err.split()[-1]
    assert key not in out
    caller = ring(api_keys_file=path).find({"authorization": f"Bearer {key}"})
    assert (caller.name, caller.rights) == ("alice", {"attention", "info"})
    assert read(path)["alice"].model_dump(exclude={"sha256", "rights"}, exclude_none=True) == {
        "concurrent": 3, "flops_per_second": 1e12,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["a/b"], "NAME: "), (["alice", "--rights", "all"], "'all'"), (["alice", "--bytes-per-second", "0"], "above 0")],
)
def test_the_command_refuses_what_the_file_would(arguments, why, capsys):
    assert main(["key", *arguments]) == 2
    assert why in capsys.readouterr().err
