// The permissions of the key: a part of the page that the key may not use says so, and its controls are greyed.

const NEEDED = { playground: "attention", traffic: "metrics", verify: "verify", benchmark: "benchmark", caches: "attention" };

// `rights` are those that /info names.
export function apply(rights) {
  for (const [id, right] of Object.entries(NEEDED)) deny(document.getElementById(id), rights.includes(right) ? null : right);
}

document.addEventListener("locked", () => apply(Object.values(NEEDED))); // another key may have others

function deny(section, right) {
  const denied = section.hasAttribute("data-denied");
  if (denied === (right !== null)) return;
  section.toggleAttribute("data-denied", !denied);
  section.querySelector(".denied")?.remove();
  for (const form of section.querySelectorAll("form")) form.inert = !denied;
  if (denied) return;
  const note = Object.assign(document.createElement("p"), { className: "denied" });
  note.textContent = `This key lacks the permission “${right}”. The operator of the server can add it to the key’s rights.`;
  section.querySelector("h2").after(note);
}
