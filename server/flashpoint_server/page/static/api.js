// Calls of the API, with the key if the user has entered one. Paths are relative: the page may be under any prefix.

const NAME = "flashpoint.key";
const TRIES = 5; // consecutive connections of an event stream without an event
const PAUSE_MS = 1000;

export const key = {
  get: () => sessionStorage.getItem(NAME),
  set: (value) => sessionStorage.setItem(NAME, value),
  forget: () => sessionStorage.removeItem(NAME),
};

// The API's address, for code that users copy.
export const base = new URL(".", location.href).href.replace(/\/$/, "");

// An error: an RFC 9457 problem document, or the same fields for other failures.
export class Problem extends Error {
  constructor({ status = 0, code = "unreachable", detail, errors = [] }) {
    super(detail ?? `the server answered ${status}`);
    Object.assign(this, { status, code, errors });
  }
}

// Return a successful answer. Throws Problem; if the key is missing or not valid, it also locks the page.
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

// Yield the events of a stream until the caller stops. A lost connection is made again, from the last event on.
// This is not an EventSource, because that cannot send a key.
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

// Yield the events of the answer to one call, without retries.
export async function* told(path, options) {
  const response = await call(path, { ...options, headers: { Accept: "text/event-stream" } });
  try {
    for await (const { data } of frames(response.body)) yield JSON.parse(data);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem({ detail: "the connection to the server was lost" });
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
    reader.cancel().catch(() => {}); // the stream has failed: its error has already been thrown
  }
}
