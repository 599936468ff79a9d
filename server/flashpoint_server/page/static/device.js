// The device, its health, the features of its backends, and the server's limits.

import { call } from "./api.js";
import { code, curl, python } from "./code.js";
import { say } from "./form.js";
import { capabilities, limits, longest } from "./options.js";
import * as rights from "./rights.js";
import { bytes } from "./text.js";

const WORDS = { ready: "Ready", not_ready: "Not ready", draining: "Shutting down", unreachable: "Unreachable" };
const panel = document.getElementById("device");
const health = document.getElementById("health");
let known = null; // the health at the last call of /info, whose answer changes with the health

const showCode = code("device", () => ({
  curl: curl("info"),
  python: python(["info = client.info()", 'print(info["device"], info["backends"])']),
}));

// Say that the page waits for a key.
export function lock() {
  known = null; // another key may see more
  health.dataset.state = "waiting";
  health.textContent = "Key needed";
}

// Return whether the server accepts work.
export async function look() {
  const found = await healthNow();
  if (found === known) return found === "ready";
  health.dataset.state = { ready: "ready", unreachable: "unreachable" }[found] ?? "waiting";
  health.textContent = WORDS[found] ?? found;
  known = found;
  if (found !== "unreachable") await describe();
  return found === "ready";
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
    rights.apply(info.rights);
    facts(info);
    list(panel.querySelector(".limits"), limits(info.limits));
    capabilities(panel.querySelector("table"), info);
    panel.querySelector(".described").hidden = false;
    say(panel, "");
  } catch (problem) {
    panel.querySelector(".described").hidden = true;
    say(panel, problem.message);
  }
}

function facts({ device, backends, versions, limits: bounds }) {
  list(panel.querySelector("dl"), {
    Device: device ? device.title : "known when the server is ready",
    Name: device?.name,
    Memory: device && bytes(device.memory),
    "Longest sequence": device && longest(device.memory, bounds.body_bytes),
    Backends: backends.join(", "),
    Versions: ["torch", "triton", "python"].map((name) => `${name} ${versions[name]}`).join(", "),
  });
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
