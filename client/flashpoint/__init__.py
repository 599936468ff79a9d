"""Flash attention as an endpoint: the Python client.

    with flashpoint.Client("http://localhost:8000") as client:
        o = client.attention(q, k, v, causal=True)  # numpy in, numpy out; torch in, torch out

- `flashpoint.sharded` computes one attention on several servers.
- `flashpoint.capacity` predicts the time of a call.
- `flashpoint.torch.attention` and `flashpoint.jax.attention` are differentiable.
- `flashpoint.integrations.transformers` computes the attention of a Hugging Face model on a server.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashpoint import capacity, sharded
    from flashpoint._calls.results import BenchmarkJob, VerifyReport
    from flashpoint._calls.service import SavedAttention
    from flashpoint._client.async_client import AsyncClient
    from flashpoint._client.caches import AsyncCache, Cache
    from flashpoint._client.client import Client
    from flashpoint._client.runs import AsyncBenchmarkRun, BenchmarkRun
    from flashpoint.cases import save_case
    from flashpoint.errors import (
        AuthenticationError,
        BadRequestError,
        CacheError,
        ClosedError,
        ConnectionFailedError,
        DeadlineExceededError,
        FieldProblem,
        FlashpointError,
        InvalidInputError,
        OverloadedError,
        ProtocolError,
        ServerError,
        TooLargeError,
    )
    from flashpoint.meta import Meta
    from flashpoint_contract.schemas.benchmark import BenchmarkEvent, BenchmarkRequest, BenchmarkRow
    from flashpoint_contract.schemas.options import AttentionOptions
    from flashpoint_contract.schemas.shapes import Shape
    from flashpoint_contract.schemas.verify import VerifyProgress, VerifyRequest

    __version__: str

__all__ = [
    "AsyncBenchmarkRun", "AsyncCache", "AsyncClient", "AttentionOptions", "AuthenticationError", "BadRequestError",
    "BenchmarkEvent", "BenchmarkJob", "BenchmarkRequest", "BenchmarkRow", "BenchmarkRun", "Cache", "CacheError",
    "Client", "ClosedError", "ConnectionFailedError", "DeadlineExceededError", "FieldProblem", "FlashpointError",
    "InvalidInputError", "Meta", "OverloadedError", "ProtocolError", "SavedAttention", "ServerError", "Shape",
    "TooLargeError", "VerifyProgress", "VerifyReport", "VerifyRequest", "__version__", "capacity", "save_case",
    "sharded",
]  # fmt: skip

# Import these modules at first use, so that `import flashpoint` alone is fast.
_NAMES = {
    "flashpoint._client.async_client": ("AsyncClient",),
    "flashpoint._client.caches": ("AsyncCache", "Cache"),
    "flashpoint._calls.service": ("SavedAttention",),
    "flashpoint._client.client": ("Client",),
    "flashpoint._calls.results": ("BenchmarkJob", "VerifyReport"),
    "flashpoint._client.runs": ("AsyncBenchmarkRun", "BenchmarkRun"),
    "flashpoint.cases": ("save_case",),
    "flashpoint.errors": ("FieldProblem", *(name for name in __all__ if name.endswith("Error"))),
    "flashpoint.meta": ("Meta",),
    "flashpoint_contract.schemas.benchmark": ("BenchmarkEvent", "BenchmarkRequest", "BenchmarkRow"),
    "flashpoint_contract.schemas.options": ("AttentionOptions",),
    "flashpoint_contract.schemas.shapes": ("Shape",),
    "flashpoint_contract.schemas.verify": ("VerifyProgress", "VerifyRequest"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = {"capacity", "cases", "errors", "meta", "sharded"}

if not TYPE_CHECKING:  # with __getattr__, type checkers would accept names that do not exist

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name == "__version__":
            value = version(__name__)
        elif name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
