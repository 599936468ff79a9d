// The tutorial: its calls go to this server, where the documentation has FLASHPOINT_URL, or http://localhost:8000.

const base = new URL("..", location.href).href.replace(/\/$/, ""); // the page may be under any prefix
const THERE = /\$\{FLASHPOINT_URL:-localhost:8000\}|(?:http:\/\/)?localhost:8000/g;

const body = document.querySelector("article");
const texts = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode;
  text.data = text.data.replace(THERE, base).replace("flashpoint.Client()", `flashpoint.Client("${base}")`);
}
for (const link of body.querySelectorAll("a")) link.setAttribute("href", link.getAttribute("href").replace(THERE, base));
