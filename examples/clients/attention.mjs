// A client of Flashpoint in JavaScript, for Node 20, Deno, Bun and browsers. No packages.
//
//     node attention.mjs [URL [KEY]]

/**
 * Numbers of a shape, row-major. Halves (F16, BF16) are their bits, as Uint16Array.
 * @typedef {{ dtype: string, shape: number[], data: ArrayBufferView<ArrayBuffer> }} Tensor
 * @typedef {Record<string, Tensor>} Tensors
 * @typedef {{ tensors: Tensors, options: Record<string, any> }} Message
 */
const ARRAYS = {
  F32: Float32Array, F64: Float64Array, F16: Uint16Array, BF16: Uint16Array,
  I32: Int32Array, I64: BigInt64Array, BOOL: Uint8Array,
};
const MEDIA_TYPE = "application/vnd.safetensors";

/** @param {Message} message @returns {Blob} 8 bytes with the length of the JSON, the JSON, then the numbers without gaps */
export function encode({ tensors, options }) {
  const metadata = Object.entries(options).map(([name, value]) => [name, JSON.stringify(value)]);
  /** @type {Record<string, any>} */
  const head = { __metadata__: Object.fromEntries(metadata) };
  let end = 0;
  for (const [name, { dtype, shape, data }] of Object.entries(tensors)) {
    head[name] = { dtype, shape, data_offsets: [end, (end += data.byteLength)] };
  }
  const text = new TextEncoder().encode(JSON.stringify(head));
  const size = new DataView(new ArrayBuffer(8));
  size.setBigUint64(0, BigInt(text.length), true);
  return new Blob([size, text, ...Object.values(tensors).map(({ data }) => data)]);
}

/** @param {ArrayBuffer} buffer @returns {Message} */
export function decode(buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  const { __metadata__: options = {}, ...entries } = head;
  /** @type {Tensors} */
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
    const Numbers = ARRAYS[dtype];
    tensors[name] = { dtype, shape, data: new Numbers(buffer.slice(start + from, start + to)) }; // an aligned copy
  }
  return { tensors, options };
}

/** An error of the server: RFC 9457. */
export class Problem extends Error {
  /** @param {number} status @param {{ code?: string, detail?: string, errors?: any[], request_id?: string }} about */
  constructor(status, about) {
    super(`${status} ${about.code ?? ""}: ${about.detail ?? ""}`);
    this.status = status;
    this.about = about;
  }
}

export class Flashpoint {
  /** @param {string} url @param {{ key?: string, timeout?: number, retries?: number }} [how] timeout in ms */
  constructor(url, { key, timeout = 60_000, retries = 4 } = {}) {
    this.url = url.replace(/\/$/, "");
    this.key = key;
    this.timeout = timeout;
    this.retries = retries;
  }

  /** Return `o`, and `lse` with `return_lse`, from q, k, v, … @param {Tensors} tensors @returns {Promise<Message>} */
  attention(tensors, options = {}) {
    return this.#send("/attention", { tensors, options });
  }

  /** Return the gradients that `grads` names, from do, q, k, v, … @param {Tensors} tensors @returns {Promise<Message>} */
  attentionGrad(tensors, options = {}) {
    return this.#send("/attention/grad", { tensors, options });
  }

  async #send(path, message) {
    const body = encode(message);
    const signal = AbortSignal.timeout(this.timeout); // timeout of the whole call
    const end = performance.now() + this.timeout;
    /** @type {Record<string, string>} */
    const headers = { "Content-Type": MEDIA_TYPE };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    for (let attempt = 0; ; attempt++) {
      headers["X-Timeout-Ms"] = String(Math.max(1, Math.floor(end - performance.now())));
      const answer = await fetch(this.url + path, { method: "POST", headers, body, signal });
      if (answer.ok) return decode(await answer.arrayBuffer());
      const problem = new Problem(answer.status, await answer.json().catch(() => ({})));
      if (![429, 503].includes(answer.status) || attempt === this.retries) throw problem;
      const seconds = Math.max(Number(answer.headers.get("Retry-After")) || 0, 0.1 * 2 ** attempt);
      if (performance.now() + seconds * 1000 >= end) throw problem; // more useful than a timeout error
      await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
    }
  }
}

// Two queries and two keys, few enough to compute by hand: the first query sees only the first key, the second both.
async function main(url, key) {
  const client = new Flashpoint(url, { key });
  const matrix = (...data) => ({ dtype: "F32", shape: [2, 2], data: new Float32Array(data) });
  const [q, k, v, dout] = [matrix(1, 0, 0, 1), matrix(1, 0, 0, 1), matrix(1, 2, 3, 4), matrix(1, 1, 1, 1)];
  const options = { causal: true, scale: 0.5 };

  const forward = await client.attention({ q, k, v }, { ...options, return_lse: true });
  const { o, lse } = forward.tensors;
  const grads = await client.attentionGrad({ do: dout, q, k, v, o, lse }, { ...options, grads: ["dq", "dv"] });
  const { dq, dv } = grads.tensors;

  const p = 1 / (1 + Math.exp(-0.5)); // the second query's weight of the second key
  const g = 4 * 0.5 * p * (1 - p);
  check("o", o, [1, 2, 1 + 2 * p, 2 + 2 * p]);
  check("lse", lse, [0.5, Math.log(1 + Math.exp(0.5))]);
  check("dq", dq, [0, 0, -g, g]);
  check("dv", dv, [2 - p, 2 - p, p, p]);
  try {
    await client.attention({ q, k, v }, { casual: true });
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    console.log("refused:", problem.message);
  }
}

function check(name, { shape, data }, expected) {
  const ok = data.length === expected.length && expected.every((x, i) => Math.abs(data[i] - x) < 1e-6);
  if (!ok) throw new Error(`${name} is ${data}, not ${expected}`);
  console.log(`${name} [${shape.join(" ")}] as it must be`);
}

const { process } = /** @type {any} */ (globalThis); // for a run from the command line
if (process?.argv[1]?.endsWith("attention.mjs")) {
  const [url = process.env.FLASHPOINT_URL || "http://localhost:8000", key] = process.argv.slice(2);
  main(url, key).catch((error) => {
    console.error(String(error));
    process.exitCode = 1;
  });
}
