"""Tables of the server's HTTP endpoints, from its OpenAPI document."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from flashpoint_contract.options import OPTIONS
from flashpoint_server.app import create_app
from flashpoint_server.config.settings import Settings

from .markdown import named, table

_METHODS = ("get", "post", "delete")
_HEADERS = {"last-event-id": "Last-Event-ID"}


@named
def calls() -> str:
    """Return a table of every endpoint, with its purpose, its query parameters, and the statuses of its answers."""
    rows = []
    for path, methods in _document()["paths"].items():
        for method in (name for name in _METHODS if name in methods):
            call = methods[method]
            query = [field for field in call.get("parameters") or [] if field["in"] == "query"]
            fields = ", ".join(f"`{field['name']}`: {_values(field['schema'])}" for field in query)
            statuses = sorted(call["responses"])
            rows.append((f"`{method.upper()} {path}`", call["summary"], fields, statuses[0], ", ".join(statuses[1:])))
    return table(["call", "does", "query", "answer", "errors"], rows)


@named
def headers() -> str:
    """Return the header fields of requests and of answers."""
    asked: dict[str, str] = {}
    answered: dict[str, str] = {}
    for methods in _document()["paths"].values():
        for call in methods.values():
            for field in call.get("parameters") or []:
                if field["in"] == "header":
                    most = field["schema"].get("maxLength")
                    text = f"{field['description']} At most {most} characters." if most else field["description"]
                    asked[_HEADERS.get(field["name"], field["name"])] = text
            for answer in call["responses"].values():
                for name, field in answer.get("headers", {}).items():
                    answered[name] = field["description"]
    rows = [("request", f"`{name}`", text) for name, text in asked.items()]
    rows += [("answer", f"`{name}`", text) for name, text in answered.items()]
    return table(["of the", "field", "meaning"], rows)


@named
def fields() -> str:
    """Return a table of fields for each JSON request without tensors, except the attention options of `/verify`."""
    parts = []
    for title, name in {
        "POST /caches": "CacheRequest",
        "POST /caches/fork": "ForkRequest",
        "POST /caches/delete": "DeleteRequest",
        "POST /caches/{id}/truncate": "TruncateRequest",
        "POST /verify, for a problem that the server draws": "VerifyRequest",
        "POST /benchmark": "BenchmarkRequest",
        "A shape": "Shape",
    }.items():
        rows = [
            (f"`{field}`", _values(schema), _default(schema), schema.get("description", ""))
            for field, schema in _document()["components"]["schemas"][name]["properties"].items()
            if name != "VerifyRequest" or field not in OPTIONS
        ]
        parts.append(f"\n### {title}\n\n{table(['field', 'values', 'default', 'meaning'], rows)}")
    return "".join(parts)


@cache
def _document() -> dict[str, Any]:
    # All settings have their defaults, so that environment variables of this process do not change the page.
    document: dict[str, Any] = create_app(Settings.model_construct()).openapi()
    return document


def _default(schema: dict[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _values(schema: dict[str, Any]) -> str:
    """Return the values of an enumeration, the types of another schema, or `list of …` for an array."""
    if "anyOf" in schema:
        parts = [part for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(map(_values, parts)))
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2].lower()
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_values(schema['items'])}" if "items" in schema else "list"
    return str(schema.get("type", ""))
