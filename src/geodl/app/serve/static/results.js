// Recognizing: images are predicted, shown in pages, and predicted again when the model changes.
import { $, bar, count, el, show } from "./dom.js";
import { pause, save, send, token } from "./http.js";
import { locked, page } from "./state.js";
import { put } from "./teach.js";

const BATCH = 8; // images in one request
const PAGE = 24; // results on a page
const UNSURE = 0.5; // the margin between the two likeliest classes is smaller
const cards = []; // the newest group first, in each group the best images to label next first
let at = 0, working = false, groups = 0;

const margin = ({ top }) => top[0].confidence - (top.length > 1 ? top[1].confidence : 0);
const FILTERS = [
  ["all", "All", () => true],
  ["unknown", "Unknown", (card) => card.found?.unknown],
  ["unsure", "Unsure", (card) => card.found && !card.found.unknown && margin(card.found) < UNSURE],
  ["flawed", "Cannot be used", (card) => card.flaw],
];

export function recognize(found) {
  const group = ++groups;
  cards.unshift(...found.map(({ file }) => ({ file, group, round: -1, near: -1, found: null, flaw: "", id: null })));
  at = 0;
  $("filter").value = "all";
  follow();
}

export function clear() {
  for (const card of cards) if (card.url) URL.revokeObjectURL(card.url);
  cards.length = at = 0;
  draw();
}

// ------------------------------------------------------------------------------------------------------------- answers

// Predict the images without an up-to-date prediction, those on the current page first.
export async function follow() {
  draw();
  if (working) return;
  working = true;
  for (let some; page.state !== null && (some = next()).length; ) {
    await predict(some);
    draw();
  }
  working = false;
  sort();
  draw();
}

function next() {
  const seen = onPage().filter((card) => card.round !== page.round || (token.get() && card.found && card.near !== page.round));
  return (seen.length ? seen : cards.filter((card) => card.round !== page.round)).slice(0, BATCH);
}

// Images that are too large together are sent one by one; if the server is busy, they are sent again.
async function predict(some) {
  const form = new FormData(), round = page.round, near = token.get() && onPage().includes(some[0]);
  for (const card of some) form.append("images", card.file, card.file.name || "image");
  try {
    const answer = await send(`predict?top=5&similar=${Boolean(near)}`, form);
    const reasons = answer.skipped.map(({ reason }) => reason);
    const good = new Map(answer.predictions.map((each) => [each.index, each]));
    some.forEach((card, i) => settle(card, round, good.get(i) || null, good.has(i) ? "" : reasons.shift() || "not an image"));
    if (near) for (const card of some) card.near = round;
  } catch (error) {
    if ([429, 503].includes(error.status)) await pause(1000);
    else if ([413, undefined].includes(error.status) && some.length > 1) for (const card of some) await predict([card]);
    else for (const card of some) settle(card, round, null, error.message);
  }
}

const settle = (card, round, found, flaw) => Object.assign(card, { round, found, flaw, drawn: false });

// What to label next: images unlike all classes, then those between two classes; unusable images come last.
function sort() {
  const rank = ({ found }) => (!found ? 2 : found.unknown ? found.score - 1e6 : margin(found));
  cards.sort((one, other) => other.group - one.group || rank(one) - rank(other));
}

// ------------------------------------------------------------------------------------------------------------- filters

const filters = () => {
  const labels = new Set(cards.filter((card) => card.found && !card.found.unknown).map((card) => card.found.label));
  return [...FILTERS, ...[...labels].sort().map((label) => [`class ${label}`, show(label), ({ found }) => found && !found.unknown && found.label === label])];
};

function picked() {
  const filter = filters().find(([key]) => key === $("filter").value) || FILTERS[0];
  return cards.filter(filter[2]);
}

function onPage() {
  const some = picked();
  at = Math.max(0, Math.min(at, Math.ceil(some.length / PAGE) - 1));
  return some.slice(at * PAGE, (at + 1) * PAGE);
}

export function turn(pages) {
  at += pages;
  follow();
  $("results-head").scrollIntoView({ block: "nearest" });
}

function drawFilters() {
  const select = $("filter"), chosen = select.value;
  const options = filters().map(([key, name, holds]) => [key, name, cards.filter(holds).length]).filter(([key, , number]) => number || key === "all");
  const made = options.map(([value, name, number]) => el("option", { value, textContent: `${name} (${number})` }));
  if (made.map((each) => each.textContent).join() === [...select.options].map((each) => each.textContent).join()) return; // it may be open
  select.replaceChildren(...made);
  select.value = options.some(([key]) => key === chosen) ? chosen : "all";
}

// ------------------------------------------------------------------------------------------------------------- drawing

function draw() {
  const focused = document.activeElement;
  drawFilters();
  const some = onPage(), total = picked().length, waiting = cards.filter((card) => card.round !== page.round).length;
  for (const card of some) drawCard(card);
  const items = some.map((card) => card.item), list = $("results");
  if (items.length !== list.children.length || items.some((item, i) => item !== list.children[i])) list.replaceChildren(...items);
  if (focused?.isConnected) focused.focus({ preventScroll: true });
  $("results-head").hidden = !cards.length;
  $("results-count").textContent = waiting ? `${cards.length - waiting} of ${count(cards.length, "image")}` : count(cards.length, "image");
  $("pages").hidden = total <= PAGE;
  $("earlier").disabled = !at;
  $("later").disabled = (at + 1) * PAGE >= total;
  $("page").textContent = `${at * PAGE + 1} to ${Math.min(total, (at + 1) * PAGE)} of ${total}`;
}

function drawCard(card) {
  if (!card.item) {
    card.url = URL.createObjectURL(card.file);
    card.body = el("div", {}, el("p", { className: "muted", textContent: "looking…" }));
    card.note = el("p", { className: "noted", role: "status" });
    card.item = el("li", {}, el("img", { className: "picture", src: card.url, alt: show(card.file.name || "image") }), card.body);
  }
  if (card.drawn === false) (card.found ? drawFound : drawFlaw)(card);
  card.drawn = true;
  const stale = card.round !== page.round && Boolean(card.found || card.flaw);
  card.item.classList.toggle("stale", stale);
  card.item.ariaBusy = String(stale);
  drawNote(card);
}

// The mark follows the tray: an image that was taught or dropped, on any page, no longer waits.
function drawNote(card) {
  const item = page.tray.find((each) => each.id === card.id);
  card.note.hidden = !item;
  if (item) card.note.textContent = `${item.job ? "Being" : "To be"} taught as ${show(item.label)}`;
}

export const drawNotes = () => onPage().forEach((card) => card.note && drawNote(card));

const fileName = (file) => el("span", { className: "file", textContent: show(file.name || ""), title: show(file.name || "") });

function drawFlaw(card) {
  card.body.replaceChildren(
    el("div", { className: "verdict" }, el("strong", { textContent: "Cannot be used" }), fileName(card.file)),
    el("p", { className: "flaw", textContent: show(card.flaw) }),
  );
}

function drawFound(card) {
  const { found } = card, fixed = locked();
  const bars = found.top.map(({ label, confidence }) => {
    const name = show(label), sure = `${Math.round(confidence * 100)} %`;
    return el("li", {}, el("button", {
      type: "button", disabled: fixed, ariaLabel: `${name} ${sure}${fixed ? "" : `. Teach this image as ${name}`}`,
      title: fixed ? "" : `It is ${name}: put the image into the tray to be taught`,
      on: { click: () => correct(card, label) },
    }, el("span", { textContent: name }), " ", bar(confidence), el("b", { textContent: sure })));
  });
  const name = el("input", { placeholder: "Another class", ariaLabel: "The right class of this image", maxLength: 255, autocomplete: "off", required: true });
  name.setAttribute("list", "known");
  const fix = el("form", { className: "fix", hidden: fixed, on: { submit: (event) => { event.preventDefault(); correct(card, name.value.trim()); name.value = ""; } } },
    name, el("button", { className: "small", textContent: "Correct" }));
  const similar = found.similar.map((each) => el("figure", {},
    el("img", { src: each.image, alt: `A stored image of ${show(each.label)}` }), el("figcaption", { textContent: show(each.label), title: show(each.label) })));
  card.body.replaceChildren(...[
    el("div", { className: found.unknown ? "verdict unknown" : "verdict" },
      el("strong", { textContent: found.unknown ? "Unknown: unlike all classes" : show(found.label) }), fileName(card.file)),
    el("ul", { className: "bars", ariaLabel: "Likeliest classes" }, ...bars), fix, card.note,
    similar.length ? el("p", { className: "near muted", textContent: "Nearest stored images" }) : null,
    similar.length ? el("div", { className: "similar" }, ...similar) : null,
  ].filter(Boolean));
}

// Put the image into the tray of its right class, out of that of a wrong one.
async function correct(card, label) {
  if (!label) return;
  const [item] = (await put(label, [card.file])) || [];
  card.id = item ? item.id : card.id;
  drawNote(card);
}

// ----------------------------------------------------------------------------------------------------------------- CSV

const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

// The columns of `geodl predict --csv`; an unusable image has only a name.
export function table() {
  const some = picked(), most = Math.max(1, ...some.map(({ found }) => (found ? found.top.length : 1)));
  const more = Array.from({ length: most - 1 }, (_, i) => [`label ${i + 2}`, `confidence ${i + 2}`]).flat();
  const rows = some.map(({ file, found }) => {
    const cells = found ? found.top.flatMap(({ label, confidence }) => [label, confidence.toFixed(4)]) : [];
    if (found) cells.splice(0, 2, found.label, cells[1], cells[0]);
    return [file.name || "image", ...cells, ...Array(2 * most + 1 - cells.length).fill("")];
  });
  return [["image", "label", "confidence", "nearest", ...more], ...rows].map((row) => row.map(cell).join(",") + "\n").join("");
}

export const saveTable = () => save(new Blob([table()], { type: "text/csv" }), `${page.model ? page.model.name : "geodl"}.csv`);
