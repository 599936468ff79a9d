// The tutorial: its calls go to this server, where the documentation has http://localhost:8000.

const base = new URL("..", location.href).href.replace(/\/$/, ""); // the page may be under any prefix
const THERE = /(?:http:\/\/)?localhost:8000/g;

const body = document.querySelector("article");
const texts = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace(THERE, base);
for (const link of body.querySelectorAll("a")) link.setAttribute("href", link.getAttribute("href").replace(THERE, base));
