"""The destructor of a `Lease`, which frees a saved forward, raises no error if `__init__` never ran."""

from flashpoint._client.saved import Lease


def test_a_lease_without_init_ends_quietly(recwarn):
    """torch.compile creates `Lease` objects without calling `__init__`."""
    del_ = Lease.__new__(Lease)
    assert del_.saved is None
    del_.__del__()
