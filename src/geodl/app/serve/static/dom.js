// Elements and text. Everything that comes from users or models is shown as text, never as markup.

export const $ = (id) => document.getElementById(id);

// Control characters are shown as escapes.
const hidden = /[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069\ufffe\uffff]/g;
export const show = (text) => String(text).replace(hidden, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));

export function el(tag, settings = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name === "on") for (const [kind, act] of Object.entries(value)) made.addEventListener(kind, act);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const button = (text, act, settings = {}) => el("button", { type: "button", textContent: text, ...settings, on: { click: act } });
export const count = (number, what) => `${number} ${number === 1 ? what : what.endsWith("s") ? what + "es" : what + "s"}`;
export const percent = (value) => (value === null || value === undefined ? "not measured" : `${value.toFixed(value === 100 ? 0 : 1)} %`);
export const when = (time) => (time ? new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "");

export function bar(part) {
  const inner = el("i");
  inner.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  return el("i", { ariaHidden: "true" }, inner);
}

// Redraw, and keep the focus on the same button, or move it to the element `instead`.
export function redraw(draw, instead) {
  const before = document.activeElement, label = before && before.ariaLabel;
  draw();
  if (!before || before.isConnected) return;
  const same = label && [...document.querySelectorAll("button")].find((each) => each.ariaLabel === label);
  (same || $(instead)).focus();
}

export function notify(text, bad = false) {
  const place = $(bad ? "problem" : "notice");
  place.textContent = text ? show(text) : "";
  place.hidden = !text;
  if (text && bad) place.scrollIntoView({ block: "nearest" });
}
