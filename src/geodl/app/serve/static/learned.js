// What the model has learned: the kept pictures by class, the doubtful ones first, and the confusion matrix.
import { $, bar, button, count, el, redraw, show } from "./dom.js";
import { attempt, call, get, token } from "./http.js";
import { locked, page } from "./state.js";

const DOUBTS = 8, STRIP = 8; // doubtful pictures and pictures of a class that are shown at first
const CLASSES = 12; // of more, the matrix shows those that are confused most
const images = new Map(); // the data addresses of pictures, by id
const open = new Set(); // classes of which all pictures are shown
let all = false; // whether all doubtful pictures are shown
let asked = 0, mended = 0; // number of requests for the list; the round of the last change of a picture

export const loadPictures = attempt(async () => {
  const mine = (asked += 1);
  const found = token.get() && !locked() ? await get("pictures").catch(() => []) : [];
  if (mine !== asked) return; // a newer request is under way
  page.pictures = found;
  if (page.round > mended + 1) $("mended").textContent = "";
  drawPictures();
});

export function drawPictures() {
  redraw(drawDoubts, "knows-title");
  for (const strip of document.querySelectorAll(".strip")) redraw(() => drawStrip(strip), "knows-title");
}

// ------------------------------------------------------------------------------------------------------------ pictures

const watched = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) { watched.unobserve(target); load(target, target.dataset.id); }
}, { rootMargin: "300px" });

function load(image, id) {
  if (!images.has(id)) images.set(id, get(`pictures/${id}`).then((found) => found.image, () => ""));
  images.get(id).then((address) => { if (address) image.src = address; });
}

const sure = ({ confidence }) => ` (${Math.round(confidence * 100)}\u00a0%)`;
const looks = (each) => (each.likely === null ? "" : `looks like ${show(each.likely)}${sure(each)}`);

function thumb(each) {
  const words = [show(each.label), looks(each), show(each.name), each.use ? "" : "no picture kept"].filter(Boolean).join(", ");
  const made = button("", () => look(each), { className: each.likely === null ? "pic" : "pic odd", title: show(each.name), ariaLabel: words });
  made.append(each.use ? picture(each.id) : el("span", { className: "absent", textContent: "Not kept" }));
  return made;
}

function picture(id) {
  const image = el("img", { alt: "" });
  image.dataset.id = id;
  watched.observe(image);
  return image;
}

// Pictures of a class under its name.
export function strip(name) {
  const made = el("div", { className: "strip", role: "group", ariaLabel: `Pictures of ${show(name)}` });
  made.dataset.name = name;
  drawStrip(made);
  return made;
}

function drawStrip(place) {
  const { name } = place.dataset, mine = page.pictures.filter((each) => each.use && each.label === name);
  const some = open.has(name) ? mine : mine.slice(0, STRIP);
  const flip = () => { if (!open.delete(name)) open.add(name); redraw(() => drawStrip(place), "knows-title"); };
  place.hidden = !mine.length;
  place.replaceChildren(...some.map(thumb));
  if (mine.length > STRIP) place.append(button(open.has(name) ? "Fewer" : `+${mine.length - STRIP}`, flip, { className: "pic more", ariaLabel: open.has(name) ? `Fewer pictures of ${show(name)}` : `+${mine.length - STRIP}: all pictures of ${show(name)}` }));
}

function drawDoubts() {
  const odd = page.pictures.filter((each) => each.likely !== null);
  $("doubts").hidden = !odd.length;
  $("doubtful").replaceChildren(...(all ? odd : odd.slice(0, DOUBTS)).map(drawDoubt));
  $("doubts-more").hidden = all || odd.length <= DOUBTS;
  $("doubts-more").textContent = `Show all ${odd.length}`;
  $("doubts-more").onclick = () => { all = true; drawDoubts(); };
}

function drawDoubt(each) {
  const what = show(named(each)), likely = show(each.likely), can = page.model && page.model.mendable;
  return el("li", {}, thumb(each),
    el("p", {}, el("strong", { textContent: show(each.label) }), ` ${looks(each)}`),
    el("p", { className: "file muted", textContent: show(each.name), title: show(each.name) }),
    el("div", { className: "row" }, ...[
      can && button(`Move to ${likely}`, () => move(each, each.likely), { className: "small", ariaLabel: `Move to ${likely}: ${what}` }),
      can && button("Forget", () => forget(each), { className: "quiet small danger", ariaLabel: `Forget ${what}` }),
      can && button("Keep", () => keep(each), { className: "quiet small", ariaLabel: `Keep ${what} as ${show(each.label)}` }),
    ].filter(Boolean)));
}

// ------------------------------------------------------------------------------------------------------------- mending

// The picture disappears at once; the other doubts are updated with the new state of the model.
const mend = (path, { id }, body, done) => attempt(async () => {
  $("picture").close();
  mended = page.round;
  page.pictures = page.pictures.filter((each) => each.id !== id);
  drawPictures();
  try {
    await call(`pictures/${path}`, { ids: [id], ...body });
    $("mended").textContent = show(done);
  } catch (error) {
    await loadPictures();
    throw error;
  }
})();

const named = ({ name, label }) => name || `an image of ${label}`;
const move = (each, label) => mend("move", each, { label }, `Moved ${named(each)} to ${label}. Undo takes it back.`);
const keep = (each) => mend("move", each, { label: each.label }, `${named(each)} stays ${each.label}, and is confirmed.`);
const forget = (each) => mend("forget", each, {}, `Forgot ${named(each)}. Undo takes it back.`);

function look(each) {
  const { mendable, classes } = page.model, others = classes.filter(({ name }) => name !== each.label);
  $("picture-title").textContent = show(each.label);
  $("picture-image").removeAttribute("src");
  $("picture-image").alt = show(each.name || each.label);
  $("picture-image").hidden = !each.use;
  if (each.use) load($("picture-image"), each.id);
  const remarks = [looks(each) && `Judged by the other images, it ${looks(each)}.`, each.use ? "" : "The model keeps no picture of it."];
  $("picture-remarks").textContent = remarks.filter(Boolean).join(" ");
  $("picture-file").textContent = show(each.name);
  $("picture-class").replaceChildren(...others.map(({ name }) => el("option", { value: name, textContent: show(name), selected: name === each.likely })));
  $("picture-move").hidden = !mendable;
  $("picture-class").hidden = $("picture-go").hidden = !others.length;
  $("picture-move").onsubmit = (event) => { event.preventDefault(); move(each, $("picture-class").value); };
  $("picture-forget").onclick = () => forget(each);
  $("picture-close").onclick = () => $("picture").close();
  $("picture").showModal();
}

// -------------------------------------------------------------------------------------------------------------- matrix

// Rows: the class; columns, by number: the predicted class.
export function drawMatrix() {
  const { classes, matrix, left_out: learned } = page.model, judged = matrix.reduce((sum, [, , number]) => sum + number, 0);
  const wrong = matrix.filter(([row, column]) => row !== column).sort((one, other) => other[2] - one[2]);
  const total = `${count(judged, "image")}${learned ? ", each judged by the model without it" : " held out to measure accuracy"}`;
  $("mixed").hidden = !judged || classes.length < 2;
  $("judged").textContent = wrong.length ? `${total}. Rows: the class; columns: the predicted class.` : `None among ${total}.`;
  const some = chosen(classes, wrong), counts = new Map(matrix.map(([row, column, number]) => [`${row} ${column}`, number]));
  $("matrix").parentElement.hidden = !wrong.length;
  const head = el("tr", {}, el("td"), ...some.map((row, i) => el("th", { scope: "col", textContent: String(i + 1), title: show(classes[row].name), ariaLabel: show(classes[row].name) })));
  const rows = some.map((row, i) => el("tr", {},
    el("th", { scope: "row", title: show(classes[row].name) }, el("span", { textContent: String(i + 1) }), ` ${show(classes[row].name)}`),
    ...some.map((column) => cell(classes[row], classes[column], counts.get(`${row} ${column}`) || 0, row === column))));
  $("matrix").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
}

function chosen(classes, wrong) {
  if (classes.length <= CLASSES) return classes.map((_, i) => i);
  const some = new Set();
  for (const [row, column] of wrong) if (new Set([...some, row, column]).size <= CLASSES) some.add(row).add(column);
  return [...some].sort((one, other) => one - other);
}

function cell(known, other, number, right) {
  const made = el("td", { textContent: number || "", className: right ? "right" : number ? "wrong" : "" });
  if (number) made.title = `${show(known.name)}${right ? " recognized" : ` predicted as ${show(other.name)}`}: ${number} of ${known.judged}`;
  if (number) made.style.setProperty("--part", `${Math.round(15 + (45 * number) / Math.max(1, known.judged))}%`);
  return made;
}

// The accuracy of a class as a bar, its 95 % interval as a line on it.
export function meter(known) {
  const made = bar((known.accuracy ?? 0) / 100);
  if (known.interval) {
    const [low, high] = known.interval, line = el("b");
    line.style.left = `${low}%`;
    line.style.width = `${high - low}%`;
    made.append(line);
  }
  return made;
}
