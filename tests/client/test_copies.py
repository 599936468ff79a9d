"""Clients, and objects that hold a client, can be copied: deep copies, pickles, torch.save and AveragedModel."""

import copy
import io
import pickle
import ssl

import httpx
import numpy as np
import pytest

import flashpoint
from flashpoint._client.saved import Lease

Q = np.zeros((1, 1, 2, 4), np.float32)
KEY = "S3cretKey"


def copies(value):
    return {"deepcopy": copy.deepcopy(value), "copy": copy.copy(value), "pickle": pickle.loads(pickle.dumps(value))}


@pytest.mark.parametrize("kind", [flashpoint.Client, flashpoint.AsyncClient])
def test_a_copy_has_the_settings_and_connections_of_its_own(kind):
    client = kind("http://host.example:81/below", timeout=7.0, retries=2, replica="r1")
    for other in copies(client).values():
        assert type(other) is kind
        assert other._http is not client._http
        assert other._own is not client._own
        copied = other.url, other._timeout, other._retries, other._replica
        assert copied == ("http://host.example:81/below", 7.0, 2, "r1")


def test_a_copy_calls_and_outlives_the_original(scripted):
    client = flashpoint.Client(scripted.url, api_key=KEY)
    with copy.deepcopy(client) as other:
        client.close()
        other.attention(Q, Q, Q)
    assert scripted.requests[0][2]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("settings", [{"api_key": KEY}, {"url": f"http://me:{KEY}@localhost"}])
def test_a_pickle_has_no_key_and_a_call_without_it_says_so(settings):
    data = pickle.dumps(flashpoint.Client(**settings))
    assert KEY.encode() not in data
    with pytest.raises(flashpoint.AuthenticationError, match=r"there is no API key: this client comes from a pickle"):
        pickle.loads(data).attention(Q, Q, Q)
    again = pickle.loads(pickle.dumps(pickle.loads(data)))
    with pytest.raises(flashpoint.AuthenticationError, match="FLASHPOINT_API_KEY"):
        again.info()


def test_the_key_of_the_environment_takes_its_place(scripted, monkeypatch):
    data = pickle.dumps(flashpoint.Client(scripted.url, api_key=KEY))
    other = pickle.loads(data)
    monkeypatch.setenv("FLASHPOINT_API_KEY", "another")
    with other:
        other.attention(Q, Q, Q)
    assert scripted.requests[0][2]["Authorization"] == "Bearer another"


@pytest.mark.parametrize(
    ("name", "value"), [("tls", ssl.create_default_context()), ("transport", httpx.HTTPTransport())]
)
def test_settings_that_cannot_be_pickled_are_shared_or_missed(name, value):
    client = flashpoint.Client(**{name: value})
    assert vars(copy.deepcopy(client))[f"_{name}"] is value
    with pytest.raises(flashpoint.InvalidInputError, match=f"{name}: is missing: this client comes from a pickle"):
        pickle.loads(pickle.dumps(client)).attention(Q, Q, Q)


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
    assert averaged.module.lease.saved is None  # the original frees it
    file = io.BytesIO()
    torch.save(module, file)
    assert KEY.encode() not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded.clients[0], flashpoint.AsyncClient)
    module.lease.saved = None


def test_a_lease_without_init_ends_quietly(recwarn):
    """torch.compile makes leases without `__init__`."""
    del_ = Lease.__new__(Lease)
    assert del_.saved is None
    del_.__del__()
