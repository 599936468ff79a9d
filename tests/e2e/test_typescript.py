"""TypeScript accepts the types of the JavaScript client, and two code generators make clients from /openapi.json."""

import json
import re
import shutil
import urllib.request
from pathlib import Path

import pytest

from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.saved import SAVED_OPTIONS
from flashpoint_contract.schemas.options import AttentionOptions
from tests.support import node

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "examples/clients"
STRICT = [
    "--strict",
    "--noEmitOnError",
    "--target",
    "es2022",
    "--module",
    "nodenext",
    "--lib",
    "es2024,dom,dom.iterable",
]
TENSORS = """
import { decode, encode, Flashpoint, Problem, type Tensor } from "./attention.mjs";

const matrix = (...data: number[]): Tensor => ({ dtype: "F32", shape: [2, 2], data: new Float32Array(data) });
const [q, k, v] = [matrix(1, 0, 0, 1), matrix(1, 0, 0, 1), matrix(1, 2, 3, 4)];
const lists = { q: [[1, 0], [0, 1]], k: [[1, 0], [0, 1]], v: [[1, 2], [3, 4]] };
const url: string = (globalThis as any).process.argv[2];
"""
BY_HAND = """
const client = new Flashpoint(url, { retries: 0 });
const { tensors } = await client.attention({ q, k, v }, { causal: true, return_lse: true });
console.log(JSON.stringify(Array.from(tensors.o.data as Float32Array)));
const grads = await client.attentionGrad({ do: v, q, k, v }, { causal: true, grads: ["dv"] });
console.log(JSON.stringify(grads.tensors.dv.shape));
try {
  // @ts-expect-error: the name of the option is wrong
  await client.attention({ q, k, v }, { casual: true });
} catch (problem) {
  if (problem instanceof Problem) console.log(problem.status, problem.about.errors?.[0].loc.join("."));
}
// @ts-expect-error: a backend that does not exist
const wrong: Parameters<Flashpoint["attention"]>[1] = { backend: "cuda" };
"""
OPENAPI_FETCH = """
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

const client = createClient<paths>({ baseUrl: url });
const { data, error } = await client.POST("/attention", { body: { ...lists, causal: true } });
if (!data) throw new Error(JSON.stringify(error));
console.log(JSON.stringify((data as components["schemas"]["AttentionAnswer"]).o));
const asked = await client.POST("/attention", {
  body: encode({ tensors: { q, k, v }, options: { causal: true } }) as any,
  bodySerializer: (body) => body as any,
  headers: { "Content-Type": "application/vnd.safetensors" },
  parseAs: "arrayBuffer",
});
console.log(JSON.stringify(Array.from(decode(asked.data as any).tensors.o.data as Float32Array)));
const refused = await client.POST("/attention", { body: { ...lists, causal: "yes" as any } });
console.log(refused.response.status, (refused.error as any).code);
"""
HEY_API = """
import { attention } from "./hey/sdk.gen.js";
import { client } from "./hey/client.gen.js";

client.setConfig({ baseUrl: url });
const { data, error } = await attention({ body: { ...lists, causal: true } });
if (!data) throw new Error(JSON.stringify(error));
console.log(JSON.stringify((data as any).o));
const asked = await attention({
  body: encode({ tensors: { q, k, v }, options: { causal: true } }) as any,
  bodySerializer: null,
  headers: { "Content-Type": "application/vnd.safetensors" },
  parseAs: "arrayBuffer",
});
console.log(JSON.stringify(Array.from(decode(asked.data as any).tensors.o.data as Float32Array)));
const refused = await attention({ body: { ...lists, causal: "yes" as any } });
console.log(refused.response?.status, (refused.error as any).code);
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the TypeScript compiler, the code generators and the JavaScript client."""
    folder = tmp_path_factory.mktemp("typescript")
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    node.install(folder, "typescript", "openapi-typescript", "openapi-fetch", "@hey-api/openapi-ts")
    for name in ("attention.mjs", "attention.d.mts"):
        shutil.copy(CLIENTS / name, folder)
    return folder


@pytest.fixture(scope="module")
def schema(folder, server):
    """Save a server's /openapi.json into the folder, and return the folder."""
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        (folder / "openapi.json").write_bytes(answer.read())
    return folder


def compiled(folder, name, text):
    """Check the types of a TypeScript program, compile it, and return the name of the JavaScript file."""
    (folder / f"{name}.ts").write_text(TENSORS + text)
    node.program(folder, "typescript", "bin/tsc", [*STRICT, f"{name}.ts"])
    return f"{name}.js"


def printed(folder, name, text, server):
    lines = node.run(folder, compiled(folder, name, text), server.url).stdout.splitlines()
    return [json.loads(line) if line.startswith("[") else line for line in lines]


EXPECTED = [1.0, 2.0, 2.3395230770111084, 3.3395230770111084]


@pytest.mark.slow
def test_the_types_of_the_client_are_right(folder, server):
    o, shape, refused = printed(folder, "by_hand", BY_HAND, server)
    assert o == pytest.approx(EXPECTED)
    assert (shape, refused) == ([2, 2], "422 casual")


def test_the_types_have_every_option():
    text = (CLIENTS / "attention.d.mts").read_text()
    interfaces = re.findall(r"interface \w*Options[^{]*{(.*?)^}", text, re.MULTILINE | re.DOTALL)
    named = re.findall(r"^  (\w+)\?:", "".join(interfaces), re.MULTILINE)
    assert sorted(named) == sorted([*AttentionOptions.model_fields, *CACHE_OPTIONS, *SAVED_OPTIONS])


@pytest.mark.slow
@pytest.mark.parametrize("generator", ["openapi-fetch", "hey-api"])
def test_a_generated_client_calls_attention_in_json_and_in_safetensors(schema, server, generator):
    if generator == "openapi-fetch":
        node.program(schema, "openapi-typescript", "bin/cli.js", ["openapi.json", "-o", "schema.d.ts"])
        text = OPENAPI_FETCH
    else:
        (schema / "openapi-ts.config.mjs").write_text(
            'export default { input: "openapi.json", plugins: ["@hey-api/client-fetch", "@hey-api/sdk"],\n'
            '  output: { path: "hey", module: { extension: ".js" } } };'
        )
        node.program(schema, "@hey-api/openapi-ts", "bin/run.js", [])
        text = HEY_API
    by_lists, by_bytes, refused = printed(schema, generator.replace("-", "_"), text, server)
    assert [x for row in by_lists for x in row] == pytest.approx(EXPECTED)
    assert by_bytes == pytest.approx(EXPECTED)
    assert refused == "422 invalid_request"
