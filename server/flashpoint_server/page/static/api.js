// Calls of the API, with the key where one was given. Paths are relative: the page may live below any prefix.

const NAME = "flashpoint.key";
const TRIES = 5; // connections of an event stream that bring nothing, in a row
const PAUSE_MS = 1000;

export const key = {
  get: () => sessionStorage.getItem(NAME),
  set: (value) => sessionStorage.setItem(NAME, value),
  forget: () => sessionStorage.removeItem(NAME),
};

// Where the API is, for code that is copied.
export const base = new URL(".", location.href).href.replace(/\/$/, "");

// An answer that is an error: an RFC 9457 problem document, or what stands for one.
export class Problem extends Error {
  constructor({ status = 0, code = "unreachable", detail, errors = [] }) {
    super(detail ?? `the server answered ${status}`);
    Object.assign(this, { status, code, errors });
  }
}

// The answer, where it is a success. Throws Problem; a key that is missing or not known also locks the page.
export async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers: sent, body: JSON.stringify(body), cache: "no-store", signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem({ detail: "the server cannot be reached" });
  }
  if (response.ok) return response;
  const document_ = await response.json().catch(() => ({}));
  if (response.status === 401) document.dispatchEvent(new Event("locked"));
  throw new Problem({ ...document_, status: response.status });
}

// The events of a stream, for as long as the caller goes on; a connection that ends is made again where it had come to.
// Not an EventSource, which cannot send a key.
export async function* events(path, signal) {
  let last = null;
  for (let failures = 0; ; failures += 1) {
    try {
      const headers = { Accept: "text/event-stream", ...(last && { "Last-Event-ID": last }) };
      const response = await call(path, { headers, signal });
      for await (const { id, data } of frames(response.body)) {
        [last, failures] = [id ?? last, 0];
        yield JSON.parse(data);
      }
    } catch (error) {
      const mayPass = error instanceof Problem ? !error.status || error.status >= 500 : error instanceof TypeError;
      if (!mayPass || failures >= TRIES) throw error;
    }
    if (failures >= TRIES) throw new Problem({ detail: "the events have stopped" });
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

// The events of the answer to one call, which is made once.
export async function* told(path, options) {
  const response = await call(path, { ...options, headers: { Accept: "text/event-stream" } });
  try {
    for await (const { data } of frames(response.body)) yield JSON.parse(data);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem({ detail: "the connection to the server broke" });
  }
}

async function* frames(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value.replaceAll("\r", "")).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
        if (fields.data) yield fields;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // of a stream that broke: what broke it has been thrown already
  }
}
