// The device, its health, and the options of its backends.

import { call } from "./api.js";
import { code, curl, python } from "./code.js";
import { say } from "./form.js";
import { bytes, number, tableRow } from "./text.js";

const WORDS = { ready: "Ready", not_ready: "Not ready", draining: "Shutting down", unreachable: "Unreachable" };
const panel = document.getElementById("device");
const health = document.getElementById("health");
let known = null; // the health that /info was last asked in: what it says changes with that

const showCode = code("options", () => ({
  curl: curl("info"),
  python: python(["info = client.info()", 'print(info["device"], info["backends"])']),
}));

export async function look() {
  const found = await healthNow();
  if (found === known) return;
  health.dataset.state = { ready: "ready", unreachable: "unreachable" }[found] ?? "waiting";
  health.textContent = WORDS[found] ?? found;
  known = found;
  if (found !== "unreachable") await describe();
}

async function healthNow() {
  try {
    await call("health/ready");
    return "ready";
  } catch (problem) {
    return problem.code;
  }
}

async function describe() {
  showCode();
  try {
    const info = await (await call("info")).json();
    facts(info);
    limitsOf(info);
    options(info);
    say(panel, "");
  } catch (problem) {
    say(panel, problem.message);
  }
}

function facts({ device, backends, versions }) {
  list(panel.querySelector("dl"), {
    Device: device ? device.title : "known once it is ready",
    Name: device?.name,
    Memory: device && bytes(device.memory),
    Backends: backends.join(", "),
    Versions: ["torch", "triton", "python"].map((name) => `${name} ${versions[name]}`).join(", "),
  });
}

function limitsOf({ limits }) {
  const shown = ([name, value]) => [name.replaceAll("_", " "), name.endsWith("bytes") ? bytes(value) : number(value, 4)];
  list(document.querySelector(".limits"), Object.fromEntries(Object.entries(limits).map(shown)));
}

function list(element, lines) {
  element.replaceChildren();
  for (const [name, value] of Object.entries(lines)) {
    if (!value) continue;
    for (const [tag, text] of [["dt", name], ["dd", value]]) {
      element.append(Object.assign(document.createElement(tag), { textContent: text }));
    }
  }
}

function options({ backends, options: able }) {
  const table = document.querySelector("#options table");
  const names = [...new Set(backends.flatMap((backend) => able[backend]))].sort();
  const cell = (backend, name) => (able[backend].includes(name) ? ["yes", "good"] : ["no", "no"]);
  const head = tableRow("Option", []);
  for (const backend of backends) {
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: backend }));
  }
  head.cells[0].scope = "col";
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(
    ...names.map((name) => tableRow(name.replaceAll("_", " "), backends.map((backend) => cell(backend, name)))),
  );
}
