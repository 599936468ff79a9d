"""All settings of the service: flags of `flashpoint serve`, environment variables FLASHPOINT_<NAME>, or a file."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from flashpoint_contract import wire
from flashpoint_contract.options import NAME
from flashpoint_contract.wording.hints import how_to_install
from flashpoint_kernels.native import switches
from flashpoint_kernels.problems import workspace
from flashpoint_server.config import key_file, tls
from flashpoint_server.config.content import content
from flashpoint_server.config.hosts import host_name
from flashpoint_server.config.key_file import RIGHTS

MIB = 1 << 20

_RIGHT = "|".join(RIGHTS)
_KEY = re.compile(rf"[A-Za-z0-9._~+/-]+=*(:({_RIGHT})(\+({_RIGHT}))*)?")  # a token (RFC 6750), optionally with rights
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")

# Maximum seconds of a setting (eleven days). The socket option TCP_USER_TIMEOUT is set to twice `body_timeout`, in
# milliseconds, and must fit in 31 bits.
LONGEST = 1_000_000

_INTEGER = re.compile(r"[+-]?\d[\d_]*(\.0*)?")


def _in_bytes(value: object) -> object:
    """Return a text such as `4GiB` as a number of bytes; other types and integers as text are returned unchanged.

    Raises ValueError for any other text.
    """
    if not isinstance(value, str) or _INTEGER.fullmatch(value.strip()):
        return value
    return workspace.parse_size(value.strip())


_SIZED = BeforeValidator(_in_bytes)
Seconds = Annotated[float, Field(gt=0, le=LONGEST)]
Bytes = Annotated[int, Field(ge=1), _SIZED]


class Settings(BaseSettings):
    """The settings of the service. `Settings()` reads only environment variables; config.sources reads all sources."""

    model_config = SettingsConfigDict(
        env_prefix="FLASHPOINT_",
        frozen=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,  # API keys are among the input
    )

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 is every interface, and :: every interface for IPv6 and IPv4"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """port to listen on; 0 takes a free port, which the log names"""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """port for gRPC on the same address (docs/oip.md); 0 takes a free port. Needs the extra `grpc`"""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|all)$")] = "auto"
    """auto, cpu, cuda, cuda:N or all. auto is CUDA if available; all starts one engine for each CUDA device"""
    cpu_float32: bool = False
    """multiply bfloat16 on the CPU in float32: slower, with equal bits on all processors with AVX-512"""
    store_ds: bool = False
    """gradients store dS, and compute dQ from it (docs/kernels.md); not measured on a GPU"""
    workspace_bytes: Bytes = workspace.DEFAULT
    """maximum bytes of stored dS of one launch, or of one key head if that has more; only with --store-ds"""
    kernels_off: Annotated[tuple[str, ...], NoDecode] = ()
    """comma-separated kernels that must not be used, such as amx.backward, avx512 or tiled (docs/operating.md)"""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """number of HTTP processes on the port. They share all limits"""

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """comma-separated bearer keys, each KEY (all rights) or KEY:right+right; see docs/security.md"""
    api_keys_file: Path | None = None
    """TOML file of keys with name, hash, rights and limits; it is reloaded when it changes (docs/security.md)"""
    insecure: bool = False
    """serve everybody on a public address without keys or --tls-client-ca; the server refuses this by default"""

    tls_key: Path | None = None
    """PEM file of the certificate's key, if --tls-cert does not contain it"""
    tls_client_ca: Path | None = None
    """PEM file of authorities; each caller must present a certificate from one of them (mTLS)"""
    tls_cert: Annotated[Path | None, Field(validate_default=True)] = None
    """PEM file of the certificate and its intermediates; enables HTTPS instead of HTTP"""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """comma-separated origins whose pages may call from a browser, such as https://example.org; * is any"""

    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """comma-separated hosts allowed in requests besides loopback names, without port, like *.example.org; * is any"""

    body_limit: Bytes = 1024 * MIB
    """maximum bytes of a request's body"""
    json_limit: Bytes = 32 * MIB
    """maximum bytes of a JSON body, and of the tensors of a JSON answer"""
    head_limit: Annotated[int, Field(ge=64, le=wire.HEAD_LIMIT), _SIZED] = wire.HEAD_LIMIT
    """maximum bytes of a safetensors head"""
    sequence_limit: Annotated[int, Field(ge=1)] = 65536
    """maximum number of sequences in one request (its batch size)"""
    body_timeout: Seconds = 10.0
    """body idle timeout in seconds; also how far a body, or an answer's reader, may fall behind --body-rate"""
    body_rate: Annotated[int, Field(ge=1), _SIZED] = 64 * 1024
    """minimum average rate, in bytes a second, at which a body arrives and an answer is read"""
    header_timeout: Seconds = 10.0
    """timeout in seconds for a request's head, from the start of the connection or of the head, and for a handshake"""
    keep_alive: Annotated[int, Field(ge=0, le=LONGEST)] = 75
    """idle timeout of a connection in seconds"""

    queue_limit: Annotated[int, Field(ge=1)] = 256
    """maximum number of admitted requests: arriving, waiting, running or being answered"""
    queue_bytes: Bytes = 4096 * MIB
    """maximum bytes of input and answer tensors of admitted requests; a single request is always admitted"""
    grpc_bytes: Annotated[int, Field(ge=64 * MIB), _SIZED] = 6144 * MIB
    """maximum bytes of memory for gRPC messages and answers; one message may take a sixth (docs/oip.md)"""
    grpc_ping_interval: Seconds = 1.0
    """minimum seconds between a gRPC client's keepalive pings; the third ping that is earlier ends the connection"""
    queue_flops: Annotated[int, Field(ge=1)] = 1 << 50
    """maximum floating-point operations of admitted requests; a single request is always admitted"""
    queue_seconds: Seconds = 600.0
    """maximum predicted compute seconds of admitted requests, on one core or the GPU; one alone is always admitted"""
    batch_flops: Annotated[int, Field(ge=1)] = 1 << 42
    """maximum floating-point operations of one launch; a larger request runs alone"""
    batch_bytes: Bytes = 1024 * MIB
    """maximum bytes of input and answer tensors of one launch; a larger request runs alone"""
    max_queue_delay: Annotated[float, Field(ge=0, le=60)] = 0.0
    """maximum seconds that a request waits on an idle device for others to share its launch; 0: never waits"""
    hang_timeout: Seconds = 600.0
    """timeout of a launch in seconds; the engine of a hung launch is restarted"""
    staging_bytes: Annotated[int, Field(ge=64 * MIB), _SIZED] = 4096 * MIB
    """maximum bytes of staging memory, shared with the engines for bodies and answers; it grows on demand"""
    shared_memory_bytes: Annotated[int, Field(ge=0), _SIZED] = 0
    """maximum bytes of shared memory that callers on this host may register (docs/oip.md); 0: off. Needs one worker"""
    cache_bytes: Annotated[int, Field(ge=0), _SIZED] = 4096 * MIB
    """maximum bytes of caches and saved forwards in each engine; a GPU reserves them at the first cache. 0: neither"""
    cache_count: Annotated[int, Field(ge=1)] = 1 << 16
    """maximum number of caches and saved forwards in each engine"""
    cache_ttl: Seconds = 600.0
    """default time to live of a cache in seconds, from its last use"""
    cache_secret: SecretStr | None = None
    """secret that replicas behind a balancer share, 32 characters or more; it validates the ids of their caches"""
    replica: Annotated[str, Field(max_length=63)] = ""
    """name of this replica behind a balancer, visible in ids of caches; random if empty"""
    saved_ttl: Seconds = 600.0
    """time to live of a saved forward in seconds, from its last use"""
    verify_flops: Annotated[int, Field(ge=1)] = 1 << 38
    """maximum floating-point operations of a verification; each problem also runs in float64 and in unfused PyTorch"""
    verify_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """share of its answers that an idle engine computes again in float64 (docs/operating.md); 0: none"""
    verify_bytes: Bytes = 64 * MIB
    """maximum bytes of the copies for --verify-rate in each engine"""
    verify_action: Literal["log", "drain"] = "log"
    """after wrong answers that --verify-rate finds: log, or after the second one also take no new work (drain)"""
    benchmark_cases: Annotated[int, Field(ge=1)] = 512
    """maximum number of cases of one benchmark"""
    benchmark_seconds: Seconds = 1800.0
    """maximum total seconds of the timed repeats of one benchmark"""
    benchmark_call_seconds: Seconds = 2.0
    """maximum predicted seconds of one call of a benchmark; it is the longest time that other requests wait for it"""
    benchmark_slice_ms: Annotated[float, Field(gt=0, le=1000)] = 20.0
    """milliseconds of a benchmark's time slice; after a slice, waiting requests run for four times as long"""
    benchmark_jobs: Annotated[int, Field(ge=1)] = 8
    """maximum number of queued or running benchmarks; one caller may have half of them"""
    benchmark_keep: Seconds = 3600.0
    """seconds for which a benchmark's result stays available after its end"""
    default_timeout_ms: Annotated[int, Field(ge=0, le=1000 * LONGEST)] = 0
    """default deadline of a request without X-Timeout-Ms, in milliseconds; 0: none"""
    max_timeout_ms: Annotated[int, Field(ge=1, le=1000 * LONGEST)] = 3_600_000
    """longest deadline that X-Timeout-Ms may set, in milliseconds; a longer one is reduced to it"""
    shutdown_timeout: Seconds = 30.0
    """shutdown timeout in seconds: admitted requests have this time to finish after SIGTERM"""

    docs_url: Annotated[str, Field(pattern="^https?://")] | None = None
    """address of the documentation's site, which the page links to; the tutorial is in the server"""
    otlp_endpoint: Annotated[str, Field(pattern="^https?://")] | None = None
    """URL for spans, by OTLP over HTTP, such as http://localhost:4318/v1/traces. Needs the extra `otel`"""
    log_format: Literal["auto", "json", "console"] = "auto"
    """json is one object a line, console is columns; auto is console if stderr is a terminal, else json"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """minimum severity of log lines"""

    @property
    def rereads(self) -> bool:
        """Return whether there are files that SIGHUP makes the server read again."""
        return self.api_keys_file is not None or self.tls_cert is not None

    @field_validator("kernels_off", mode="before")
    @classmethod
    def _known_kernels(cls, value: object) -> object:
        return switches.parse(value) if isinstance(value, str) else value

    @field_validator("api_keys", "cors_origins", "allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _keys_can_be_read(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None:
            key_file.entries(info.data.get("api_keys", ()), content(path), path)
        return path

    @field_validator("tls_cert")
    @classmethod
    def _a_certificate_with_its_key(cls, cert: Path | None, info: ValidationInfo) -> Path | None:
        key, client_ca = info.data.get("tls_key"), info.data.get("tls_client_ca")
        if cert is not None:
            cls._read_certificate(cert, key, client_ca)
        elif key is not None or client_ca is not None:
            raise ValueError("is missing; --tls-key and --tls-client-ca need it")
        return cert

    @classmethod
    def _read_certificate(cls, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        tls.read(cert, key, client_ca)

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError("must be origins such as https://example.org, or *")
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            name = host.removeprefix("*.")
            if host != "*" and ("*" in name or host_name(name) != name.lower()):
                raise ValueError(
                    f"{host!r} is not allowed: give a host name or an address without a port, *.example.org, or *"
                )
        return hosts

    @field_validator("cache_secret")
    @classmethod
    def _long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < 32:
            raise ValueError("needs 32 or more random characters; make them with: openssl rand -hex 32")
        return secret

    @field_validator("replica")
    @classmethod
    def _a_name(cls, name: str) -> str:
        if name and not NAME.fullmatch(name):
            raise ValueError("may contain only letters, digits and ._:/+=@~-")
        return name

    @field_validator("shared_memory_bytes")
    @classmethod
    def _one_process_knows_the_regions(cls, limit: int, info: ValidationInfo) -> int:
        if limit and info.data.get("workers", 1) > 1:
            raise ValueError("needs one worker: only the HTTP process that registered a region knows it")
        return limit

    @field_validator("grpc_port")
    @classmethod
    def _with_grpc(cls, port: int | None) -> int | None:
        if port is not None and find_spec("grpc") is None:
            raise ValueError(f"needs the extra grpc; {how_to_install('grpc')}")
        return port

    @field_validator("otlp_endpoint")
    @classmethod
    def _with_its_extra(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and find_spec("opentelemetry.exporter") is None:
            raise ValueError(f"needs the extra otel; {how_to_install('otel')}")
        return endpoint

    @field_validator("api_keys")
    @classmethod
    def _known_rights(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for number, key in enumerate(keys, 1):
            # The message contains the key's number, not the key: errors are printed and logged, but keys must not be.
            if not _KEY.fullmatch(key.get_secret_value()):
                raise ValueError(f"key {number} must be KEY or KEY:right+right; rights are {', '.join(RIGHTS)}")
        return keys


class GivenSettings(Settings):
    """Settings that do not read the files of keys and certificates, because another process has."""

    @field_validator("api_keys_file")
    @classmethod
    def _keys_can_be_read(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return path

    @classmethod
    def _read_certificate(cls, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        pass
