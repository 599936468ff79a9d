"""A client's settings are checked, no text shows its API key or password, and its copies have separate connections."""

import asyncio
import copy
import io
import pickle
import ssl
import traceback

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint import cli
from flashpoint._client.saved import Lease
from tests.support.framed import Q


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("retries", {"retries": -1}), ("timeout", {"timeout": -1}), ("timeout", {"timeout": 1_000_001}),
        *(("url", {"url": url}) for url in ("http://x:port", "localhost:8000", "ftp://x", "http://", "/here", "")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("client_class", [flashpoint.Client, flashpoint.AsyncClient])
def test_bad_settings_are_refused_and_named(client_class, field, settings):
    with pytest.raises(flashpoint.InvalidInputError) as info:
        client_class(**settings)
    assert info.value.errors[0].field == field


def test_the_longest_timeout_is_taken(scripted, connect):
    assert np.array_equal(connect(scripted.url, timeout=1_000_000).attention(Q, Q, Q), Q)


def test_a_client_reads_its_server_and_its_key_from_the_environment(scripted, connect, monkeypatch):
    assert flashpoint.Client().url == flashpoint.AsyncClient().url == "http://localhost:8000"
    monkeypatch.setenv("FLASHPOINT_URL", scripted.url)
    monkeypatch.setenv("FLASHPOINT_API_KEY", "secret")
    for settings in ({}, {"api_key": "own"}, {"api_key": ""}):
        connect(**settings).attention(Q, Q, Q)
    keys = [headers["Authorization"] for _, _, headers, _ in scripted.requests]
    assert keys == ["Bearer secret", "Bearer own", None]


CLIENTS = [
    ({"url": "localhost:8000"}, "url: must begin with http:// or https:// and name a host"),
    ({"retries": -1}, "retries: must be an integer, 0 or more"),
    ({"timeout": "1s"}, "timeout: must be a number of seconds above 0"),
    ({"replica": "é"}, "replica: must be printable ASCII of up to 128 characters"),
]


@pytest.mark.parametrize(("keywords", "message"), CLIENTS, ids=[" ".join(row[0]) for row in CLIENTS])
def test_a_client_that_cannot_be_made_says_why(keywords, message):
    with pytest.raises(flashpoint.InvalidInputError) as error:
        flashpoint.Client(**keywords)
    assert message in str(error.value)


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
        key = key.replace("\0", "\x01")  # environment variables cannot contain NUL
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
        assert scripted.requests[0][2]["Authorization"] == "Basic bWU6UzNjcmV0IQ=="  # base64 of me:S3cret!
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


X = np.zeros((1, 1, 2, 4), np.float32)
KEY = "S3cretKey"
SIZES = {"layers": 1, "kv_heads": 1, "head_dim": 4}


def copies(value):
    return {"deepcopy": copy.deepcopy(value), "copy": copy.copy(value), "pickle": pickle.loads(pickle.dumps(value))}


async def refused(client):
    """Ask for a cache, which the server refuses, then close the client."""
    with pytest.raises(flashpoint.OverloadedError):
        await client.cache(**SIZES) if isinstance(client, flashpoint.AsyncClient) else client.cache(**SIZES)
    await client.aclose() if isinstance(client, flashpoint.AsyncClient) else client.close()


@pytest.mark.parametrize("kind", [flashpoint.Client, flashpoint.AsyncClient])
def test_a_copy_has_the_settings_and_connections_of_its_own(kind, scripted, delays, timed_waits):
    client = kind(f"{scripted.url}/below", timeout=7.0, retries=2, replica="r1")
    for other in (*copies(client).values(), client):
        assert type(other) is kind
        scripted.script.extend([lambda handler: handler.problem(429)] * 3)
        asyncio.run(refused(other))  # and closes its connections, not those of the next one
    assert len(scripted.requests) == 4 * 3
    asked = {(path, head["X-Flashpoint-Replica"], head["X-Timeout-Ms"]) for _, path, head, _ in scripted.requests}
    assert asked == {("/below/caches", "r1", "7000")}
    assert scripted.connections == 4


def test_a_copy_calls_and_outlives_the_original(scripted):
    client = flashpoint.Client(scripted.url, api_key=KEY)
    with copy.deepcopy(client) as other:
        client.close()
        other.attention(X, X, X)
    assert scripted.requests[0][2]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("settings", [{"api_key": KEY}, {"url": f"http://me:{KEY}@localhost"}])
def test_a_pickle_has_no_key_and_a_call_without_it_says_so(settings):
    data = pickle.dumps(flashpoint.Client(**settings))
    assert KEY.encode() not in data
    with pytest.raises(flashpoint.AuthenticationError, match=r"there is no API key: this client comes from a pickle"):
        pickle.loads(data).attention(X, X, X)
    again = pickle.loads(pickle.dumps(pickle.loads(data)))
    with pytest.raises(flashpoint.AuthenticationError, match="FLASHPOINT_API_KEY"):
        again.info()


def test_the_key_of_the_environment_takes_its_place(scripted, monkeypatch):
    data = pickle.dumps(flashpoint.Client(scripted.url, api_key=KEY))
    other = pickle.loads(data)
    monkeypatch.setenv("FLASHPOINT_API_KEY", "another")
    with other:
        other.attention(X, X, X)
    assert scripted.requests[0][2]["Authorization"] == "Bearer another"


@pytest.mark.parametrize(
    ("name", "value"), [("tls", ssl.create_default_context()), ("transport", httpx.HTTPTransport())]
)
def test_settings_that_cannot_be_pickled_are_shared_or_missed(name, value):
    client = flashpoint.Client(**{name: value})
    assert vars(copy.deepcopy(client))[f"_{name}"] is value
    with pytest.raises(flashpoint.InvalidInputError, match=f"{name}: is missing: this client comes from a pickle"):
        pickle.loads(pickle.dumps(client)).attention(X, X, X)


def test_a_subclass_keeps_what_it_adds():
    client = Labelled("http://localhost")
    client.label = ["a"]
    other = copy.deepcopy(client)
    assert other.label == ["a"]
    assert other.label is not client.label
    assert pickle.loads(pickle.dumps(client)).label == ["a"]


class Labelled(flashpoint.Client):
    label = None


def test_modules_with_clients_are_saved_and_averaged():
    torch = pytest.importorskip("torch")

    module = torch.nn.Linear(2, 2)
    module.client, module.clients = flashpoint.Client(api_key=KEY), [flashpoint.AsyncClient()]
    module.lease = Lease(module.client, "saved-1")
    averaged = torch.optim.swa_utils.AveragedModel(module)
    assert averaged.module.client.url == module.client.url
    assert averaged.module.lease.saved is None  # only the original lease frees the saved forward
    file = io.BytesIO()
    torch.save(module, file)
    assert KEY.encode() not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded.clients[0], flashpoint.AsyncClient)
    module.lease.saved = None
