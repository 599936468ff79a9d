// The page. If the server has keys, it is locked until the user enters one. It updates every two seconds while visible.

import { call, key } from "./api.js";
import * as benchmark from "./benchmark.js";
import * as caches from "./caches.js";
import * as device from "./device.js";
import { say } from "./form.js";
import * as playground from "./playground.js";
import * as traffic from "./traffic.js";
import * as verify from "./verify.js";

const EVERY_MS = 2000;

const main = document.getElementById("main");
const door = document.getElementById("key");
const parts = document.querySelector("nav");
const forget = document.getElementById("forget");
let timer = null;

function lock() {
  clearTimeout(timer);
  timer = null;
  if (key.get()) say(door, "This key is not valid.");
  key.forget();
  [main.hidden, parts.hidden, door.hidden] = [true, true, false];
  device.lock();
  door.elements.key.focus();
}

function open() {
  [main.hidden, parts.hidden, door.hidden, forget.hidden] = [false, false, true, !key.get()];
  playground.showCode();
  verify.showCode();
  benchmark.showCode();
  caches.showCode();
  benchmark.resume();
  timer = setTimeout(look, 0);
}

async function look() {
  const mine = timer; // differs from `timer` later if the page was locked and opened again
  if (!document.hidden) {
    const [ready] = await Promise.all([device.look(), traffic.look().then(caches.look)]);
    if (ready) playground.look();
  }
  if (timer === mine) timer = setTimeout(look, EVERY_MS);
}

document.addEventListener("locked", lock);
forget.addEventListener("click", () => {
  key.forget();
  document.dispatchEvent(new Event("locked"));
});
door.addEventListener("submit", async (event) => {
  event.preventDefault();
  say(door, "");
  key.set(door.elements.key.value.trim());
  door.reset();
  try {
    await call("info");
  } catch (problem) {
    if (problem.status === 401) return; // and locked again
  }
  open();
});

if ("locked" in document.body.dataset && !key.get()) lock();
else open();
