// Read a form as a request, and show the errors of the request in the form.

// Return the fields by name, "shape.q_len" as {shape: {q_len}}, without empty fields and those with the API's default.
export function read(form) {
  const found = {};
  const defaults = {};
  for (const field of form.elements) {
    if (!field.name || field.matches(":disabled")) continue;
    const value = valueOf(field);
    if (value === undefined) continue;
    if (field.dataset.default) defaults[field.name] = field.dataset.default;
    found[field.name] = Array.isArray(value) ? [...(found[field.name] ?? []), ...value] : value;
  }
  const request = {};
  for (const [name, value] of Object.entries(found)) {
    if (JSON.stringify(value) === JSON.stringify(JSON.parse(defaults[name] ?? "null"))) continue;
    const [group, part] = name.split(".");
    if (part) (request[group] ??= {})[part] = value;
    else request[group] = value;
  }
  return request;
}

function valueOf(field) {
  const text = field.value.trim();
  if (field.type === "checkbox") return field.dataset.list ? (field.checked ? [text] : []) : field.checked;
  if (text === "") return undefined;
  if (field.dataset.json !== undefined) return JSON.parse(text);
  if (field.dataset.list) return text.split(/[\s,]+/).map(field.dataset.list === "numbers" ? wholeOf : String);
  return field.type === "number" ? Number(text) : text;
}

// Return the number of a text such as "512" or "16k", with k for 1024.
function wholeOf(text) {
  return text.endsWith("k") ? 1024 * Number(text.slice(0, -1)) : Number(text);
}

// Return whether the browser finds no error. Show all errors, and focus the first field with one.
export function valid(form, { focus = true } = {}) {
  clear(form);
  const wrong = [...form.querySelectorAll(":invalid:not(fieldset)")];
  for (const field of wrong) mark(field);
  if (!wrong.length) return true;
  say(form, wrong.map((field) => `${labelOf(field)}: ${field.validationMessage}`).join("\n"));
  if (focus) wrong[0].focus();
  return false;
}

// Show the server's errors at the fields that it names.
export function refused(form, problem) {
  clear(form);
  for (const { loc } of problem.errors ?? []) {
    const path = loc.join(".").split(".");
    const field = [...form.elements].find(({ name }) => name && path.includes(name.split(".").at(-1)));
    if (field) mark(field);
  }
  say(form, problem.message);
}

export function clear(form) {
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  say(form, "");
}

// Mark a result as out of date when the form differs from the request that started it.
export function aging(form, result) {
  let begun = null;
  form.addEventListener("input", () => {
    if (begun !== null) result.toggleAttribute("data-stale", JSON.stringify(read(form)) !== begun);
  });
  return () => {
    begun = JSON.stringify(read(form));
    result.removeAttribute("data-stale");
  };
}

// Show text in the alert of a form or a panel; an empty text hides it.
export function say(within, text) {
  const alert = within.querySelector(".problem");
  alert.hidden = !text;
  alert.textContent = text;
}

function mark(field) {
  field.setAttribute("aria-invalid", "true");
  const folded = field.closest("details");
  if (folded) folded.open = true;
}

function labelOf(field) {
  return (field.closest("label") ?? field).firstChild.textContent.trim();
}
