// Attention by its formula, in float64: the page's own numbers, and the weights from q, k and lse only.

// A sentence with q, k and v of four heads of a small real model, from docs/make_sentence.py: {model, sentence, tokens,
// heads: [{name, layer, head}], q, k, v}.
export const sentence = await (await fetch(new URL("sentence.json", import.meta.url))).json();

const PHASE = 0.7; // sin((seed + 0.7)·n²) looks random, and every language computes the same
const SIZE = { near: 0.5, random: 2 }; // of the noise in q and k

// Tensors of a problem as nested lists (heads, length, dimension), rounded to 2 decimals. `near`: tokens that are close
// to each other have similar q and k; head h looks 3·h tokens back. `random`: noise alone. `words`: those of the sentence.
export function tensors({ q_heads, kv_heads, q_len, kv_len, head_dim, pattern, seed }) {
  if (pattern === "words") return { q: sentence.q, k: sentence.k, v: sentence.v };
  const near = pattern === "near";
  const size = SIZE[pattern];
  const first = kv_len - q_len; // the position of the first query
  return {
    q: tensor(3 * seed, size, q_heads, q_len, head_dim, near && ((head) => first - 3 * head)),
    k: tensor(3 * seed + 1, size, kv_heads, kv_len, head_dim, near && (() => 0)),
    v: tensor(3 * seed + 2, 1, kv_heads, kv_len, head_dim, false),
  };
}

function tensor(seed, size, heads, length, dim, start) {
  const element = (head, row, d) => {
    const n = (head * length + row) * dim + d;
    const place = start ? 1.5 * Math.cos((start(head) + row) / 2 ** Math.floor(d / 2) - ((d % 2) * Math.PI) / 2) : 0;
    return Math.round(100 * (place + size * Math.sin((seed + PHASE) * (n * n)))) / 100 + 0; // no −0
  };
  return range(heads).map((head) => range(length).map((row) => range(dim).map((d) => element(head, row, d))));
}

// The sizes of a problem of this pattern that the form does not decide.
export function sizesOf(pattern) {
  if (pattern !== "words") return {};
  const [count, length] = [sentence.heads.length, sentence.tokens.length];
  return { q_heads: count, kv_heads: count, q_len: length, kv_len: length, head_dim: sentence.q[0][0].length };
}

// The lines of Python that make the same tensors with numpy; those of the sentence come from the server at `base`.
export function pythonTensors({ q_heads, kv_heads, q_len, kv_len, head_dim, pattern, seed }, base) {
  if (pattern === "words") {
    return [
      `with urllib.request.urlopen("${base}/static/sentence.json") as file:`,
      "    sentence = json.load(file)",
      'q, k, v = (np.array(sentence[name], np.float32)[None] for name in "qkv")  # (batch, heads, length, dimension)',
    ];
  }
  const near = pattern === "near";
  const head = [
    `def tensor(seed, size, heads, length, dim${near ? ", start=None" : ""}):`,
    "    n = np.arange(heads * length * dim).reshape(heads, length, dim)",
    `    x = size * np.sin((seed + ${PHASE}) * (n * n))`,
  ];
  const place = [
    "    if start is not None:  # tokens that are close to each other have similar q and k",
    "        d, row = np.arange(dim), np.arange(length)[:, None]",
    "        start = np.reshape(start, (-1, 1, 1))",
    "        x += 1.5 * np.cos((start + row) / 2.0 ** (d // 2) - d % 2 * np.pi / 2)",
  ];
  const size = SIZE[pattern];
  const starts = near ? [`, ${kv_len - q_len} - 3 * np.arange(${q_heads})`, ", 0"] : ["", ""];
  return [
    ...head,
    ...(near ? place : []),
    "    return x.round(2)[None].astype(np.float32)  # (batch, heads, length, dimension)",
    "",
    "",
    `q = tensor(${3 * seed}, ${size}, ${q_heads}, ${q_len}, ${head_dim}${starts[0]})`,
    `k = tensor(${3 * seed + 1}, ${size}, ${kv_heads}, ${kv_len}, ${head_dim}${starts[1]})`,
    `v = tensor(${3 * seed + 2}, 1, ${kv_heads}, ${kv_len}, ${head_dim})`,
  ];
}

// The slopes of ALiBi (Press et al. 2022): the first head's, its square, its cube …
export function slopes(first, heads) {
  return range(heads).map((head) => first ** (head + 1));
}

// Return the functions of one head: `score(i, j)`, scaled, capped and reduced by ALiBi; `distance(i, j)` of a key from
// the diagonal; `seen(i, j)`; `weight(i, j)` = exp(score − lse); `sink(i)`, the weight of the sink, which has no value;
// `total(i)`, the sum of a row's weights; `received(j)`, the sum of a column's; `o(i)`, computed from these weights;
// `gradients(i, d)` of element d of o(i): {dq: a row, dk, dv: rows by key}.
export function head({ q, k, v }, lse, options, number) {
  const group = q.length / k.length; // query heads that share a key/value head
  const [Q, K, V] = [q[number], k[Math.floor(number / group)], v[Math.floor(number / group)]];
  const { scale = 1 / Math.sqrt(Q[0].length), softcap = 0, sinks, alibi_slopes } = options;
  const mask = visible(Q.length, K.length, options);
  const distance = (i, j) => Math.abs(j - i - offsetOf(Q.length, K.length, options));
  const product = (i, j) => scale * dot(Q[i], K[j]);
  const score = (i, j) => {
    const capped = softcap ? softcap * Math.tanh(product(i, j) / softcap) : product(i, j);
    return alibi_slopes ? capped - alibi_slopes[number] * distance(i, j) : capped;
  };
  const share = (s, i) => (lse[i] === -Infinity ? 0 : Math.exp(s - lse[i]));
  const weight = (i, j) => (mask(i, j) ? share(score(i, j), i) : 0);
  const keys = range(K.length);
  const sum = (values) => values.reduce((so_far, x) => so_far + x, 0);
  const o = (i) => V[0].map((_, d) => sum(keys.map((j) => weight(i, j) * V[j][d])));
  // dsoftmax = weight · (v − o); the softcap passes on 1 − tanh² of it.
  const gradients = (i, d) => {
    const there = o(i)[d];
    const passed = (j) => (softcap ? 1 - Math.tanh(product(i, j) / softcap) ** 2 : 1);
    const ds = keys.map((j) => (mask(i, j) ? scale * weight(i, j) * (V[j][d] - there) * passed(j) : 0));
    return {
      dq: Q[i].map((_, c) => sum(keys.map((j) => ds[j] * K[j][c]))),
      dk: keys.map((j) => Q[i].map((x) => ds[j] * x)),
      dv: keys.map((j) => V[0].map((_, c) => (c === d ? weight(i, j) : 0))),
    };
  };
  return {
    rows: Q.length, columns: K.length, seen: mask, score, distance, weight,
    sink: (i) => (sinks ? share(sinks[number], i) : 0),
    total: (i) => sum(keys.map((j) => weight(i, j))), received: (j) => sum(range(Q.length).map((i) => weight(i, j))),
    o, gradients,
  };
}

// (i, j) → whether query i may see key j. The diagonal of `bottom_right` ends at the last query and the last key.
export function visible(q_len, kv_len, options) {
  const { causal, window = [-1, -1], attn_mask } = options;
  const offset = offsetOf(q_len, kv_len, options);
  const [left, right] = window;
  return (i, j) => {
    const ahead = j - i - offset; // of the diagonal
    if (causal && ahead > 0) return false;
    if ((left >= 0 && ahead < -left) || (right >= 0 && ahead > right)) return false;
    return attn_mask ? attn_mask[i][j] : true;
  };
}

function offsetOf(q_len, kv_len, { causal_alignment }) {
  return causal_alignment === "top_left" ? 0 : kv_len - q_len;
}

export function range(length) {
  return Array.from({ length }, (_, i) => i);
}

function dot(a, b) {
  return a.reduce((sum, x, d) => sum + x * b[d], 0);
}
