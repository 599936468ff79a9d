// Names for the parts that the theme makes, and a way to scroll wide tables with the keyboard.
function named() {
  document.querySelectorAll(".md-code__nav").forEach((part, n) => part.setAttribute("aria-label", `Code block ${n + 1}`));
  const seen = new Map(); // a page with two headings of one name has two lists of contents of that name
  for (const part of document.querySelectorAll("nav[aria-label]")) {
    const name = part.dataset.name ?? part.getAttribute("aria-label");
    const count = (seen.get(name.toLowerCase()) ?? 0) + 1; // capacity and Capacity sound alike
    seen.set(name.toLowerCase(), count);
    if (count > 1) [part.dataset.name, part.ariaLabel] = [name, `${name} (${count})`];
  }
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((part, n) => {
    if (part.scrollWidth <= part.clientWidth) return;
    for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", `Table ${n + 1}`]]) part.setAttribute(name, value);
  });
}

new MutationObserver(named).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", named);
named();
