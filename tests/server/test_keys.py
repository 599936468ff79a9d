import pytest
from pydantic import ValidationError

from flashpoint_server.keys import Keyring
from flashpoint_server.refusal import Refusal
from flashpoint_server.settings import Settings


def status(keyring, authorization, right="attention"):
    try:
        keyring.admit({} if authorization is None else {"authorization": authorization}, right)
    except Refusal as refusal:
        return refusal.status
    return 200


def test_without_keys_all_may_do_all():
    assert status(Keyring([]), None) == 200


@pytest.mark.parametrize(
    ("authorization", "right", "expected"),
    [
        (None, "info", 401),
        ("Bearer", "info", 401),
        ("Bearer nobody", "info", 401),
        ("Basic first", "info", 401),
        ("Bearer first", "attention", 200),
        ("bearer  first ", "attention", 200),
        ("Bearer look", "info", 200),
        ("Bearer look", "attention", 403),
        ("Bearer look:info", "info", 401),
        ("Bearer both", "attention", 200),
        ("Bearer schlüssel", "info", 401),
    ],
)
def test_rights(authorization, right, expected):
    assert status(Keyring(["first", "look:info", "both:attention+info"]), authorization, right) == expected


def test_keys_come_comma_separated_and_are_not_shown(monkeypatch):
    monkeypatch.setenv("FLASHPOINT_API_KEYS", "s3cret, tok/en+=:info,")
    settings = Settings()
    assert [key.get_secret_value() for key in settings.api_keys] == ["s3cret", "tok/en+=:info"]
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize("keys", ["with space", "s3cret:all", "s3cret:", ":info", "s3cret:info+"])
def test_a_wrong_key_setting_is_refused_without_being_shown(keys):
    with pytest.raises(ValidationError) as caught:
        Settings(api_keys=keys)
    message = caught.value.errors(include_input=False)[0]["msg"]
    assert "key 1 must be" in message
    assert "s3cret" not in message
