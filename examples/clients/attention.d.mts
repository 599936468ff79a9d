// Types of attention.mjs, for TypeScript.

/** Element types of safetensors. F16 and BF16 are bits in a Uint16Array. */
export type DType = "F32" | "F64" | "F16" | "BF16" | "I32" | "I64" | "BOOL";

/** A tensor with its numbers in row-major order. */
export interface Tensor {
  dtype: DType;
  shape: number[];
  data: ArrayBufferView<ArrayBuffer>;
}

export type Tensors = Record<string, Tensor>;

/** The options of docs/reference/options.md. */
export interface Options {
  layout?: "bhsd" | "bshd" | "thd";
  causal?: boolean;
  causal_alignment?: "bottom_right" | "top_left";
  /** Keys before and after the diagonal that a query sees; -1 is no bound. */
  window?: [left: number, right: number];
  /** Queries and keys of a block of `block_mask`, multiples of 16. */
  block_size?: [queries: number, keys: number];
  scale?: number | null;
  softcap?: number;
  dropout_p?: number;
  /** From 0 to 2^53 - 1. */
  dropout_seed?: number | null;
  precision?: "ieee" | "tf32";
  deterministic?: boolean;
  backend?: "auto" | "triton" | "cpu" | "torch" | "tiled" | "reference";
}

export interface ForwardOptions extends Options {
  return_lse?: boolean;
  /** Return `key_weights`, the sum over the queries of each key's probability. */
  return_key_weights?: boolean;
  /** Ids of KV caches, one for each sequence of q; they replace k and v. */
  caches?: string[];
  layer?: number;
  /** Positions, one for each sequence, where k and v are written. */
  at?: number[] | null;
  /** Save this forward on the server; the answer's options have its id, `saved`. */
  save?: boolean;
}

export interface GradOptions extends Options {
  grads?: ("dq" | "dk" | "dv" | "dattn_mask" | "dsinks")[];
  /** Id of a saved forward. */
  saved?: string | null;
}

/** Tensors by name, and options. In an answer, options are the metadata, as JSON texts. */
export interface Message<O = Record<string, string>> {
  tensors: Tensors;
  options: O;
}

/** Return the bytes of a message: 8 bytes with the length of the JSON, the JSON, then the numbers. */
export function encode(message: Message<object>): Blob;

/** Return the message in an answer's bytes. */
export function decode(buffer: ArrayBuffer): Message;

/** An error of the server: RFC 9457. */
export class Problem extends Error {
  readonly status: number;
  readonly about: {
    code?: string;
    detail?: string;
    errors?: { loc: (string | number)[]; msg: string }[];
    request_id?: string;
  };
}

export class Flashpoint {
  /** `timeout` is the timeout of a whole call in milliseconds. */
  constructor(url: string, how?: { key?: string; timeout?: number; retries?: number });

  /** Return `o`, and `lse` with `return_lse`, from q, k, v, … Throws Problem. */
  attention(tensors: Tensors, options?: ForwardOptions): Promise<Message>;

  /** Return the gradients that `grads` names, from do, q, k, v, … Throws Problem. */
  attentionGrad(tensors: Tensors, options?: GradOptions): Promise<Message>;
}
