"""The web page, Swagger UI, the list of errors and the tutorial: GET /, /docs, /docs/… and /static/….

They are rendered when the server starts, and contain no secrets. The web page gets its data from the API, with the API
key that the user enters.
"""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import version
from importlib.resources import files
from typing import Any, get_args

from fastapi import APIRouter, Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from flashpoint_contract.options import Backend, CausalAlignment, Layout, Precision
from flashpoint_contract.schemas.benchmark import BenchmarkRequest, PlotKind, Preset, TimedDtype
from flashpoint_contract.schemas.shapes import Direction, Dtype, Shape
from flashpoint_contract.schemas.verify import Extra, VerifyRequest
from flashpoint_server.http.request import request_of
from flashpoint_server.page.errors import ERRORS
from flashpoint_server.refusal import STATUS, Refusal
from flashpoint_server.service import Service

# Allow only the page's own files: no inline scripts or styles, and no other host.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Swagger UI sets style attributes on elements, and contains its icons as data URLs.
DOCS_POLICY = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'").replace(
    "img-src 'self'", "img-src 'self' data:"
)
HEADERS = {
    # browsers revalidate a cached file at each use (answered with 304), so that an upgrade is visible at once
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}
_TAG = re.compile(r'(?:W/)?("[^"]*")')
HTML = "text/html; charset=utf-8"
TYPES = {
    "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "json": "application/json",
    "svg": "image/svg+xml",
}  # fmt: skip
CASES: dict[Preset, str] = {"papers": "papers: three small tables", "h100": "h100: FlashAttention’s own grid"}
PLOTS: dict[PlotKind, str] = {
    "time": "Time", "tflops": "TFLOP/s", "speedup": "Speed-up", "memory": "Memory", "roofline": "Roofline",
}  # fmt: skip


def router(service: Service) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    docs_url = service.settings.docs_url
    here, swagger = files(__package__), files("fastapi_swagger.resources")
    pages = {
        "/": _File(_index(locked=service.keys.locked, docs_url=docs_url), HTML),
        "/docs": _File((here / "templates" / "docs.html").read_bytes(), HTML, DOCS_POLICY),
        "/docs/errors": _File(_errors(), HTML),
        "/docs/tutorial": _File(_tutorial(docs_url), HTML),
    }
    ours = (here / "static").iterdir()
    others = [swagger / name for name in ("swagger-ui-bundle.js", "swagger-ui.css")]
    others += [here / "vendor" / "uplot" / name for name in ("uPlot.esm.js", "uPlot.min.css")]
    static = {file.name: _File(file.read_bytes(), TYPES[file.name.rpartition(".")[2]]) for file in (*ours, *others)}

    for path, page in pages.items():
        routes.add_api_route(path, page.answer)

    @routes.get("/static/{name}")
    async def file(name: str, request: Request) -> Response:
        if name not in static:
            raise Refusal("not_found", f"{request.url.path} does not exist")
        return await static[name].answer(request)

    return routes


class _File:
    """A file in memory that the server answers with this Content-Security-Policy."""

    def __init__(self, content: bytes, media_type: str, policy: str = POLICY) -> None:
        self._content, self._media_type, self._policy = content, media_type, policy
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    async def answer(self, request: Request) -> Response:
        headers = HEADERS | {"Content-Security-Policy": self._policy, "ETag": self._etag}
        if has_copy(request_of(request.scope).headers.get("if-none-match", ""), self._etag):
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._media_type)


def has_copy(if_none_match: str, etag: str) -> bool:
    """Return whether the values of If-None-Match name `etag`: `*`, or a list of tags (RFC 9110, §13.1.2).

    A proxy that compresses a file makes its tag weak: `W/"…"`. The comparison ignores this.
    """
    return if_none_match.strip() == "*" or etag in _TAG.findall(if_none_match)


def _render(template: str, **values: Any) -> bytes:
    loader = PackageLoader("flashpoint_server.page", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["words"] = _words
    return environment.get_template(template).render(values).encode()


def _words(text: str) -> Markup:
    """Return a sentence as HTML: capitalised, and with the text in backquotes as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text[:1].upper() + text[1:]))))


def _errors() -> bytes:
    rows = [
        (code, status, Refusal(code, "").headers.get("Retry-After"), ERRORS[code]) for code, status in STATUS.items()
    ]
    return _render("errors.html", errors=rows)


def _tutorial(docs_url: str | None) -> bytes:
    """Return docs/tutorial.md as a page. Its links to other pages lead to `docs_url`, or become plain text."""
    text = (files(__package__) / "templates" / "tutorial.html").read_text(encoding="utf-8")
    there = rf'<a href="{docs_url.rstrip("/")}/\1.html\2">\3</a>' if docs_url else r"\3"
    body = Markup(re.sub(r'<a href="([\w./-]+)\.md(#[\w-]+)?">(.*?)</a>', there, text))
    return _render("page.html", body=body)


def _index(*, locked: bool, docs_url: str | None) -> bytes:
    return _render(
        "index.html",
        locked=locked,
        docs_url=docs_url,
        version=version("flashpoint"),
        defaults=_defaults(VerifyRequest) | _defaults(BenchmarkRequest) | _defaults(Shape),
        dtypes=get_args(Dtype),
        timed_dtypes=get_args(TimedDtype),
        directions=get_args(Direction),
        layouts=get_args(Layout),
        alignments=get_args(CausalAlignment),
        precisions=get_args(Precision),
        backends=get_args(Backend),
        extras=get_args(Extra),
        cases=[("", "the grid below"), *CASES.items()],
        plots=PLOTS,
    )


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a request's fields as JSON values: the page sends only fields that differ from them."""
    return {
        name: to_jsonable_python(field.default)
        for name, field in model.model_fields.items()
        if not field.is_required() and field.default_factory is None
    }
