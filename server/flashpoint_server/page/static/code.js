// Code for the page's requests, as curl and as Python, for users to copy.

import { base, key } from "./api.js";

const KEY = "FLASHPOINT_API_KEY"; // copied code reads the key from here, as the command line does: the key itself is never shown

// `write` returns {curl, python}. Call the returned function when that has changed.
export function code(id, write) {
  const block = document.getElementById(`${id}-code`);
  const text = block.querySelector("code");
  const show = () => {
    text.textContent = write()[block.querySelector("input:checked").value];
  };
  block.querySelector("fieldset").addEventListener("change", show);
  block.querySelector("[data-copy]").addEventListener("click", ({ target }) => copy(target, text));
  show();
  return show;
}

// A curl command; `body` is JSON.
export function curl(path, body, flags = "-s") {
  const parts = [`curl ${flags} ${quoted(`${base}/${path}`)}`];
  if (key.get()) parts.push(`-H "Authorization: Bearer $${KEY}"`);
  if (body) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(body))}`);
  return parts.join(" \\\n  ");
}

// A program with a client: `lines` are the body of its `with`, `before` comes first; it also imports `library`, in which
// "" separates the standard library from others.
export function python(lines, { library = [], before = [] } = {}) {
  const split = library.indexOf("");
  const standard = [...library.slice(0, Math.max(split, 0)), ...(key.get() ? ["os"] : [])].sort();
  const others = library.slice(split + 1);
  const imported = (names) => (names.length ? [...names.map((name) => `import ${name}`), ""] : []);
  const imports = [...imported(standard), ...imported(others), "import flashpoint"];
  const secret = key.get() ? `, api_key=os.environ["${KEY}"]` : "";
  const body = lines.map((line) => `    ${line}`);
  const made = before.length ? ["", "", ...before] : [];
  return [...imports, ...made, "", `with flashpoint.Client("${base}"${secret}) as client:`, ...body].join("\n");
}

// Return a request as the keyword arguments of a call.
export function keywords(request) {
  return Object.entries(request).map(([name, value]) => `${name}=${literal(value)}`).join(", ");
}

function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, one]) => `"${name}": ${literal(one)}`).join(", ")}}`;
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

async function copy(button, element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    button.textContent = "Copied";
  } catch {
    // Browsers allow the clipboard only for https and localhost; otherwise the user copies the selected text.
    getSelection().selectAllChildren(element);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}
