"""`Keyring` finds the API key of a request and checks its permissions. Keys come from a setting and a file."""

import hashlib
import json

import pytest
from pydantic import ValidationError

from flashpoint_server.access.keys import ANYONE, Keyring
from flashpoint_server.config.settings import Settings
from flashpoint_server.refusal import Refusal
from tests.support.messages import ask, post, problem, small


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
    """Write a key file and return its path. The API key of an entry is its name, twice: `alicealice` for alice."""
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
    """All errors about an unknown key are equal, and so are those about a missing permission: they give no details."""
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
    assert keys not in str(caught.value)  # a program that embeds the server may write this error to a log


def test_keys_of_a_file_have_names_rights_and_limits(tmp_path):
    path = keys_file(tmp_path / "keys.toml", alice={}, bob={"rights": ["info", "metrics"], "concurrent": 2})
    keyring = ring(api_keys="plain", api_keys_file=path)
    assert [keyring.find({"authorization": f"Bearer {key}"}).name for key in ("alicealice", "bobbob", "plain")] == [
        "alice", "bob", "key-1",
    ]  # fmt: skip
    assert status(keyring, "Bearer alicealice") == 200
    assert status(keyring, "Bearer bobbob") == 403
    assert status(keyring, "Bearer bobbob", "metrics") == 200
    assert status(keyring, f"Bearer {sha256('alicealice')}") == 401  # the hash of a key is not accepted as a key


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


def test_without_a_known_key_401(strict):
    for headers in ({}, *({"authorization": value} for value in ("Bearer wrong", "Bearer ", "Basic all", "all"))):
        answer = post(strict, "/attention", small(), **headers)
        problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_key_without_the_right_403(strict):
    problem(post(strict, "/attention", small(), authorization="Bearer looker"), 403, "forbidden")
    assert post(strict, "/attention", small(), authorization="Bearer all").status == 200
    for key, status in (("looker", 200), ("all", 200), ("no", 401)):
        assert ask(strict, "/info", authorization=f"Bearer {key}").status == status
    assert ask(strict, "/health/live").status == 200
    assert ask(strict, "/health/ready").status == 200
