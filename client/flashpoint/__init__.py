"""Flash attention as an endpoint: the Python client.

    with flashpoint.Client("http://localhost:8000") as client:
        o = client.attention(q, k, v, causal=True)  # numpy in, numpy out; torch in, torch out

`flashpoint.sharded` shares one attention over several servers, and `flashpoint.capacity` predicts what a call takes.
`flashpoint.torch.attention` is differentiable; `flashpoint.integrations.transformers` serves a Hugging Face model's
attention.
"""

from importlib.metadata import version

from flashpoint import capacity, sharded
from flashpoint._async_client import AsyncClient
from flashpoint._caches import AsyncCache, Cache
from flashpoint._calls import SavedAttention
from flashpoint._client import Client
from flashpoint._runs import AsyncBenchmarkRun, BenchmarkRun
from flashpoint.benchmark_schema import BenchmarkEvent, BenchmarkJob, BenchmarkRequest, BenchmarkRow
from flashpoint.cases import save_case
from flashpoint.errors import (
    AuthenticationError,
    BadRequestError,
    CacheError,
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
from flashpoint.options import AttentionOptions
from flashpoint.shape_schema import Shape
from flashpoint.verify_schema import VerifyProgress, VerifyReport, VerifyRequest

__version__ = version("flashpoint")

__all__ = [
    "AsyncBenchmarkRun",
    "AsyncCache",
    "AsyncClient",
    "AttentionOptions",
    "AuthenticationError",
    "BadRequestError",
    "BenchmarkEvent",
    "BenchmarkJob",
    "BenchmarkRequest",
    "BenchmarkRow",
    "BenchmarkRun",
    "Cache",
    "CacheError",
    "Client",
    "ConnectionFailedError",
    "DeadlineExceededError",
    "FieldProblem",
    "FlashpointError",
    "InvalidInputError",
    "Meta",
    "OverloadedError",
    "ProtocolError",
    "SavedAttention",
    "ServerError",
    "Shape",
    "TooLargeError",
    "VerifyProgress",
    "VerifyReport",
    "VerifyRequest",
    "__version__",
    "capacity",
    "save_case",
    "sharded",
]
