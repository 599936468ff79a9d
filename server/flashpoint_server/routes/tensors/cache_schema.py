"""Pydantic models of /caches, for JSON bodies and OpenAPI."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from flashpoint_contract.caches import MOST_CACHES, MOST_TOKENS
from flashpoint_server.access.cache_ids import MOST_LAYERS
from flashpoint_server.config.settings import LONGEST

Size = Annotated[int, Field(ge=1, le=1 << 16)]
Length = Annotated[int, Field(ge=0, lt=MOST_TOKENS)]
Sizes = Size | Annotated[list[Size], Field(min_length=1, max_length=MOST_LAYERS)]
Keep = Annotated[int, Field(ge=1, lt=MOST_TOKENS)] | None
Ids = Annotated[list[str], Field(min_length=1, max_length=MOST_CACHES)]
CacheDtype = Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"]


class _CacheBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class CacheRequest(_CacheBody):
    """Caches to create. A size is one number for all layers, or a list with one number for each layer."""

    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    """number of layers of the model"""
    kv_heads: Sizes = 8
    """number of key/value heads, Hk; a list has a number for each layer, also in the next fields"""
    head_dim: Sizes = 64
    """columns of k, D"""
    value_dim: Sizes | None = None
    """columns of v, Dv; default: head_dim"""
    dtype: CacheDtype = "float32"
    """dtype of q, k and v. 8-bit caches store a scale for each token and head; their calls use any other dtype"""
    count: Annotated[int, Field(ge=1, le=MOST_CACHES)] = 1
    """number of caches of this shape, all on one engine"""
    max_length: Annotated[int, Field(ge=1, lt=MOST_TOKENS)] | None = None
    """maximum number of tokens; the memory for them is allocated now"""
    keep: Keep | Annotated[list[Keep], Field(min_length=1, max_length=MOST_LAYERS)] = None
    """number of last tokens that a layer keeps; earlier ones may be freed"""
    ttl_s: Annotated[float, Field(gt=0, le=LONGEST)] | None = None
    """time to live in seconds after the last use; the default is a setting of the server"""
    beside: str | None = None
    """id of a cache; the new caches are created on the same engine"""


class ForkRequest(_CacheBody):
    """Copies to create. They share memory until one is written."""

    caches: Ids
    """ids of the caches to copy; an id may occur several times"""
    lengths: Annotated[list[Length], Field(min_length=1, max_length=MOST_CACHES)] | None = None
    """tokens in each copy; default: all"""
    free: Annotated[list[str], Field(max_length=MOST_CACHES)] = []
    """ids of caches to delete in the same call"""


class DeleteRequest(_CacheBody):
    caches: Ids
    """ids of the caches to delete"""


class TruncateRequest(_CacheBody):
    length: Length
    """tokens that stay, in every layer"""


class CacheDescription(BaseModel):
    """A cache. `lengths` has one number for each layer. `bytes` includes all memory that it shares with forks."""

    model_config = ConfigDict(title="Cache")
    id: str
    layers: int
    kv_heads: int | list[int]
    head_dim: int | list[int]
    value_dim: int | list[int]
    dtype: str
    max_length: int | None
    keep: int | list[int | None] | None
    ttl_s: float
    lengths: list[int]
    bytes: int
    expires_in_s: float


class CacheList(BaseModel):
    caches: list[CacheDescription]


class CachePage(BaseModel):
    caches: list[CacheDescription]
    next: str = ""
    """`after` of the next page; absent on the last page"""


class CacheLength(BaseModel):
    length: int
