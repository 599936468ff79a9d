"""A lease that was made without `__init__` ends quietly."""

from flashpoint._client.saved import Lease


def test_a_lease_without_init_ends_quietly(recwarn):
    """torch.compile makes leases without `__init__`."""
    del_ = Lease.__new__(Lease)
    assert del_.saved is None
    del_.__del__()
