"""API keys are checked when a client is made, and no text shows a key."""

import traceback

import pytest

import flashpoint
from flashpoint import cli

WRONG = [
    "S3cret\n",
    " S3cret",
    "S3cret\r\n",
    "S3 cret",
    "S3crét",
    "S3cret\0",
    "S3cret\x7f",
    "S3\tcret",
    "S3cret\u2028",
    "\n",
]


@pytest.fixture(params=[flashpoint.Client, flashpoint.AsyncClient])
def kind(request):
    return request.param


def text_of(error):
    return "".join(traceback.format_exception_only(error)) + repr(error) + str(error) + repr(error.__cause__)


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("source", ["api_key", "FLASHPOINT_API_KEY"])
def test_a_wrong_key_is_refused_and_not_shown(kind, monkeypatch, source, key):
    if "\0" in key and source == "FLASHPOINT_API_KEY":
        key = key.replace("\0", "\x01")  # variables cannot have NUL
    monkeypatch.setenv("FLASHPOINT_API_KEY", key if source == "FLASHPOINT_API_KEY" else "")
    with pytest.raises(flashpoint.InvalidInputError, match=f"^{source}: ") as refused:
        kind(api_key=key if source == "api_key" else None)
    assert "S3" not in text_of(refused.value)


@pytest.mark.parametrize("key", [b"S3cret", 7])
def test_a_key_that_is_no_text_is_refused(kind, key):
    with pytest.raises(flashpoint.InvalidInputError, match="api_key: must be a str") as refused:
        kind(api_key=key)
    assert "S3" not in text_of(refused.value)


def test_the_command_line_refuses_it_too(capsys):
    assert cli.main(["info", "--url", "http://127.0.0.1:1", "--api-key", "S3cret\n"]) == 2
    told = capsys.readouterr()
    assert "--api-key: begins or ends with white space" in told.err
    assert "S3" not in told.err + told.out


def test_a_user_and_a_password_in_the_url_are_sent_and_not_shown(scripted):
    url = scripted.url.replace("http://", "http://me:S3cret%21@")
    with flashpoint.Client(url, retries=0) as client:
        scripted.script.append(lambda handler: handler.problem(401))
        with pytest.raises(flashpoint.AuthenticationError) as refused:
            client.info()
        assert scripted.requests[0][2]["Authorization"] == "Basic bWU6UzNjcmV0IQ=="  # me:S3cret!
        assert client.url == scripted.url
        assert "S3" not in text_of(refused.value) + repr(client) + repr(vars(client))
    with pytest.raises(flashpoint.ConnectionFailedError) as failed:
        flashpoint.Client("http://me:S3cret@127.0.0.1:1", retries=0).info()
    assert "S3" not in text_of(failed.value)


@pytest.mark.parametrize("url", ["http://me:S3/cret@host", "http://me:S3cret@host:port", "ftp://me:S3cret@host",
                                 "http://me:S3cret@ho\nst", "http://me:S3cret@[::"])  # fmt: skip
def test_a_wrong_url_with_a_password_does_not_show_it(kind, url):
    with pytest.raises(flashpoint.InvalidInputError) as refused:
        kind(url)
    assert "S3" not in text_of(refused.value)


def test_a_key_and_a_password_in_the_url_are_refused(kind):
    with pytest.raises(flashpoint.InvalidInputError, match="cannot be combined"):
        kind("http://me:S3cret@host", api_key="k")


@pytest.mark.parametrize("to", ["https://me:S3cret@other.example/attention", "/login?next=1"])
def test_a_redirect_names_its_location_without_credentials(scripted, connect, to):
    scripted.script.append(lambda handler: handler.answer(307, Location=to))
    with pytest.raises(flashpoint.ProtocolError, match="redirects to http") as refused:
        connect(scripted.url, retries=0).info()
    assert "S3" not in str(refused.value)
    assert ("other.example/attention" if "other" in to else "/login?next=1") in str(refused.value)


@pytest.mark.parametrize("media", ["Application/Vnd.Safetensors", "APPLICATION/VND.SAFETENSORS ; Charset=Binary"])
def test_media_types_are_read_in_any_case(scripted, connect, media):
    import numpy as np

    from tests.support.scripted_server import message

    q = np.zeros((1, 1, 2, 4), np.float32)
    scripted.script.append(lambda handler: handler.answer(body=message({"o": q}), media=media))
    assert np.array_equal(connect(scripted.url).attention(q, q, q), q)
