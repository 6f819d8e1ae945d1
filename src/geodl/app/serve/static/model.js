// The classes of the model, its history, and changes of both.
import { $, button, count, el, percent, redraw, show, when } from "./dom.js";
import { ask, attempt, call, get, token, writable } from "./http.js";
import { drawMatrix, meter, strip } from "./learned.js";
import { page } from "./state.js";
import { drawTrays } from "./teach.js";

let reverted = 0; // the round of the last undo or redo

export const change = (path, body) => attempt(async () => {
  if (await writable()) await call(path, body);
});

export const load = attempt(async () => {
  page.model = await get("model");
  if (page.round > reverted + 1) $("reverted").textContent = "";
  drawModel();
});

export function drawAccess() {
  $("unlock").hidden = !page.model || page.model.read_only || token.get() !== "";
}

function drawModel() {
  const model = page.model, learned = model.classes.length > 0;
  document.title = `${model.name} · geodl`;
  $("name").textContent = show(model.name);
  const facts = model.classes.length ? [count(model.classes.length, "class"), model.accuracy === null ? null : `${percent(model.accuracy)} accuracy`, model.read_only ? "read only" : null] : ["It knows nothing yet: teach it two classes to begin"];
  $("lead").textContent = facts.filter(Boolean).join(" · ");
  $("teach").hidden = model.read_only;
  $("knows").hidden = !learned;
  $("past").hidden = !model.steps.length && !model.redo;
  $("known").replaceChildren(...model.classes.map((each) => el("option", { value: each.name })));
  redraw(() => $("classes").replaceChildren(...model.classes.map(drawClass)), "knows-title");
  drawMatrix();
  $("confusions").replaceChildren(...model.confusions.map((each) => el("li", {}, el("strong", { textContent: show(each.class) }), " predicted as ", el("strong", { textContent: show(each.taken_for) }), `: ${each.images} of ${each.of}`)));
  $("steps").replaceChildren(...model.steps.map(drawStep).reverse());
  $("undo").hidden = model.read_only;
  $("undo").disabled = !model.undo;
  $("redo").hidden = model.read_only || !model.redo;
  $("onnx").hidden = !model.onnx || !learned;
  $("report").hidden = !learned;
  drawAccess();
  drawTrays();
}

function drawClass(known) {
  const name = show(known.name), measured = known.accuracy !== null;
  const actions = page.model.read_only ? null : el("div", { className: "row" },
    button("Rename", () => rename(known.name), { className: "quiet small", ariaLabel: `Rename ${name}` }),
    button("Remove", () => removeClass(known.name), { className: "quiet small danger", ariaLabel: `Remove ${name}` }));
  const range = measured ? known.interval.map((each) => each.toFixed(0)).join(" to ") : "";
  const title = measured ? `Accuracy on ${count(known.judged, "image")}, 95 % interval ${range} %` : "Accuracy is not measured: too few images, or all in one series";
  return el("li", {}, el("strong", { textContent: name }), actions,
    el("div", { className: "meter", title }, meter(known),
      el("span", { className: "muted", textContent: `${measured ? `${percent(known.accuracy)} (${range}) · ` : ""}${count(known.images, "image")}` })),
    strip(known.name));
}

const which = ({ image, images }) => (image ? show(image) : images > 1 ? count(images, "image") : "an image");

// The description of a step.
function described(step) {
  const words = {
    learn: () => `Learned ${[...step.new, ...step.returning].map(show).join(", ")} from ${count(step.images, "image")}${step.accuracy === null ? "" : `: ${percent(step.accuracy)} accuracy`}`,
    rename: () => `Renamed ${show(step.old)} to ${show(step.new)}`,
    remove: () => `Removed ${show(step.class)}`,
    relabel: () => `Moved ${which(step)} from ${show(step.old)} to ${show(step.new)}`,
    confirm: () => `Confirmed ${which(step)} as ${show(step.class)}`,
    forget: () => `Forgot ${which(step)}`,
    damaged: () => "A damaged state",
  }[step.action];
  return words ? words() : show(step.action);
}

const drawStep = (step) => el("li", {}, el("time", { textContent: when(step.time) }), el("span", { textContent: described(step) }));

export const revert = (path, done) => attempt(async () => {
  reverted = page.round;
  $("reverted").textContent = "";
  const { record } = (await writable()) ? await call(path) : {};
  if (record) $("reverted").textContent = `${done}: ${described(record)}`;
});

async function rename(old) {
  const found = await ask({ title: `Rename ${old}`, text: "The new name of the class", value: old, yes: "Rename" });
  if (found && found.value !== old) await change("classes/rename", { old, new: found.value.trim() })();
}

async function removeClass(name) {
  const found = await ask({ title: `Remove ${name}?`, text: "The model will no longer know this class. Undo restores it.", check: "For good: no image of it is kept anywhere, and there is no undo", yes: "Remove" });
  if (found) await change("classes/remove", { name, for_good: found.checked })();
}
