// Teaching: the images collected on the server, and the jobs that learn them.
import { $, button, count, el, percent, redraw, show, notify } from "./dom.js";
import { shoot } from "./camera.js";
import { droppable, picker } from "./files.js";
import { attempt, call, get, send, writable } from "./http.js";
import { drawNotes } from "./results.js";
import { page } from "./state.js";

const SHOWN = 23; // thumbnails of a class
const MANY = 50, LARGE = 5e7; // images and bytes in one request
const pictures = new Map(), boxes = new Map(), dismissed = new Set();
let sending = 0, seen = false; // uploads in progress; whether jobs were drawn before

// ------------------------------------------------------------------------------------------------------------ the tray

// Collect images of a class on the server, some at a time; return the collected images.
export const put = attempt(async (label, files) => {
  page.shown.add(label);
  drawTrays();
  return files.length ? collect(files.map((file) => [label, file])) : [];
});

async function collect(pairs) {
  if (!(await writable())) return [];
  const progress = el("progress", { max: 1, value: 0, ariaLabel: "Sending" }), kept = [];
  const box = el("div", { className: "job" }, el("p", { textContent: `Sending ${count(pairs.length, "image")}` }), progress);
  if (pairs.length > 1) $("sending").append(box);
  sending += 1;
  drawTrays();
  try {
    while (kept.length < pairs.length) {
      const some = portion(pairs.slice(kept.length)), form = new FormData();
      for (const [label, file] of some) {
        form.append("images", file, file.name || "image");
        form.append("labels", label);
      }
      kept.push(...(await send("tray/add", form, (part) => { progress.value = (kept.length + part * some.length) / pairs.length; })));
    }
    return kept;
  } catch (error) {
    throw new Error(`${count(pairs.length - kept.length, "image")} not collected: ${error.message}`);
  } finally {
    sending -= 1;
    box.remove();
    await loadTray();
  }
}

function portion(pairs) {
  let size = 0;
  const end = pairs.findIndex(([, file], i) => i === MANY || (i && (size += file.size) > LARGE));
  return end < 0 ? pairs : pairs.slice(0, end);
}

// visible: whether this page may see the tray.
export async function loadTray(visible = true) {
  page.tray = visible ? await get("tray").catch(() => page.tray) : [];
  for (const { label } of page.tray) page.shown.delete(label);
  drawTrays();
  drawNotes();
}

const drop = attempt(async (what) => {
  page.tray = await call("tray/drop", what);
  drawTrays();
  drawNotes();
});

// Images in folders go to the classes named by the folders, others to the class on which they were dropped.
export const sort = attempt(async (found, label) => {
  const deepest = Math.max(0, ...found.map(({ folders }) => folders.length));
  const top = new Set(found.map(({ folders }) => folders[0]));
  const level = deepest > 1 && top.size === 1 ? 1 : 0; // a folder of class folders, or class folders themselves
  const pairs = found.map(({ file, folders }) => [(label || folders[Math.min(level, folders.length - 1)] || "").normalize("NFC"), file]);
  const lost = pairs.filter(([name]) => !name).length;
  await collect(pairs.filter(([name]) => name));
  if (lost) notify(`${count(lost, "image")} without a class: drop them on a class, or in a folder named after it`, true);
});

export function drawTrays() {
  const trays = new Map([...page.shown].map((label) => [label, []]));
  for (const item of page.tray) trays.set(item.label, [...(trays.get(item.label) || []), item]);
  redraw(() => $("trays").replaceChildren(...[...trays].map(([label, items]) => drawTray(label, items))), "new-name");
  const images = page.tray.filter((item) => !item.job).length;
  $("teach-foot").hidden = !trays.size;
  $("teach-hint").hidden = trays.size > 0;
  $("tray-count").textContent = images ? `${count(images, "image")} of ${count(trays.size, "class")}` : "";
  $("go").disabled = !images || sending > 0;
  $("go").textContent = images ? `Teach ${count(images, "image")}` : "Teach";
}

function drawTray(label, items) {
  const known = page.model && page.model.classes.some((each) => each.name === label);
  const thumbs = items.slice(0, SHOWN).map(drawThumb);
  if (items.length > SHOWN) thumbs.push(el("li", { className: "more", textContent: `+${items.length - SHOWN}` }));
  const flaws = items.filter((item) => item.flaw);
  const forget = () => { page.shown.delete(label); return items.length ? drop({ label }) : drawTrays(); };
  const tray = el("li", { className: "tray" },
    el("div", { className: "row" },
      el("strong", {}, show(label), " ", el("small", { textContent: `${count(items.length, "image")}${known ? ", known already" : ""}` })),
      button("×", forget, { className: "quiet small", ariaLabel: `Drop the class ${show(label)}` })),
    items.length ? el("ul", { className: "thumbs", ariaLabel: `Images of ${show(label)}` }, ...thumbs) : el("p", { className: "muted hint", textContent: "Drop images here, or" }),
    ...flaws.slice(0, 5).map((item) => el("p", { className: "flaw", textContent: `${show(item.name)}: ${show(item.flaw)}` })),
    flaws.length > 5 ? el("p", { className: "flaw", textContent: `and ${flaws.length - 5} more` }) : null,
    el("div", { className: "row" }, el("div", { className: "row" },
      button("Add images", () => picker({ accept: "image/*" }, (found) => sort(found, label)), { className: "small", ariaLabel: `Add images to ${show(label)}` }),
      button("Folder", () => picker({ webkitdirectory: true }, (found) => sort(found, label)), { className: "small", ariaLabel: `Add a folder of images to ${show(label)}` }),
      button("Camera", attempt(() => shoot((found) => sort(found, label), label)), { className: "small", ariaLabel: `Camera: take pictures for ${show(label)}` }))));
  droppable(tray, (found) => sort(found, label));
  return tray;
}

function drawThumb(item) {
  const name = show(item.name);
  const image = el("img", { alt: name, title: item.flaw ? `${name}: ${show(item.flaw)}` : name });
  if (!item.flaw) {
    if (!pictures.has(item.id)) pictures.set(item.id, get(`tray/${item.id}`).then((found) => found.image, () => ""));
    pictures.get(item.id).then((address) => { if (address) image.src = address; });
  }
  return el("li", { className: item.flaw ? "broken" : item.job ? "given" : "" }, image,
    button("×", () => drop({ ids: [item.id] }), { ariaLabel: `Take ${name} out`, disabled: Boolean(item.job) }));
}

// ---------------------------------------------------------------------------------------------------------------- jobs

export const teach = attempt(async () => {
  if (sending || !(await writable())) return;
  await call("tray/teach");
  await loadTray();
  $("jobs").scrollIntoView({ block: "nearest" });
});

const lasts = (job) => ["waiting", "running"].includes(job.state);

// The outcome of a job is shown on every page until the model changes, unless it ended before the page was opened.
export function drawJobs() {
  if (!seen) for (const job of page.jobs) if (!lasts(job)) dismissed.add(job.id);
  seen = true;
  const shown = page.jobs.filter((job) => !dismissed.has(job.id) && (lasts(job) || job.version === page.state));
  const drawn = shown.map((job) => {
    // A running job is changed in place: a button must not be replaced while it is pressed.
    const old = boxes.get(job.id), key = `${job.state} ${job.advice.length}`;
    const made = old && old.key === key ? old : { key, box: drawJob(job) };
    boxes.set(job.id, made);
    drawProgress(made.box, job);
    return made.box;
  });
  if (drawn.length !== $("jobs").children.length || drawn.some((box, i) => $("jobs").children[i] !== box)) $("jobs").replaceChildren(...drawn);
}

const classesOf = (job) => {
  const names = Object.keys(job.classes).map(show);
  return names.slice(0, 5).join(", ") + (names.length > 5 ? " …" : "") || "a folder";
};

function drawProgress(box, job) {
  const text = box.querySelector(".doing"), progress = box.querySelector("progress");
  if (!text) return;
  const epochs = job.doing === "learning" && job.epochs > 0 ? `, epoch ${Math.max(job.epoch, 1)} of ${job.epochs}` : "";
  const about = job.seconds > 5 && job.part < 0.05 ? `, about ${job.seconds < 90 ? Math.round(job.seconds) + " s" : Math.round(job.seconds / 60) + " min"}` : "";
  const doing = { reading: "Reading the images of ", learning: "Learning " }[job.doing];
  text.textContent = doing ? `${doing}${classesOf(job)}${epochs}${about}` : `${classesOf(job)}: ${job.doing}`;
  if (job.state === "running") progress.value = job.part;
}

function drawJob(job) {
  const what = classesOf(job), box = el("div", { className: `job ${job.state}`, role: "group", ariaLabel: `Teaching ${what}` });
  const dismiss = button("Dismiss", () => { dismissed.add(job.id); drawJobs(); }, { className: "quiet small" });
  const act = (path) => attempt(async () => { if (await writable()) await call(`jobs/${job.id}/${path}`); });
  if (job.state === "running" || job.state === "waiting") {
    box.append(el("p", { className: "doing" }), el("progress", { max: 1, ariaLabel: "Progress of teaching" }),
      ...job.advice.map((sentence) => el("p", { className: "muted", textContent: show(sentence) })),
      button("Cancel", act("cancel"), { className: "small" }));
  } else {
    box.append(el("div", { role: "status" }, ...outcome(job, what)), dismiss);
  }
  return box;
}

function outcome(job, what) {
  if (job.state === "failed") return [el("p", { textContent: `Not learned: ${show(job.error)}` })];
  if (job.state === "cancelled") return [el("p", { textContent: `Cancelled. The model is as it was before ${what}.` })];
  const result = job.result, parts = [];
  const learned = [...result.new, ...result.returning].map(show).join(", ");
  parts.push(el("p", {}, el("strong", { textContent: result.already ? "The model knows all of these images already." : `Learned ${learned} from ${count(result.images, "image")}.` })));
  const judged = result.left_out ? "images, each judged by the model without it" : "held-out images";
  if (result.accuracy !== null) parts.push(el("p", { textContent: `It recognizes ${percent(result.accuracy)} of ${result.judged} ${judged}.` }));
  for (const warning of result.warnings) parts.push(el("p", { className: "muted", textContent: show(warning) }));
  if (job.skipped.length) parts.push(el("details", { open: true }, el("summary", { textContent: `${count(job.skipped.length, "file")} left out` }),
    el("ul", {}, ...job.skipped.slice(0, 50).map(({ name, reason }) => el("li", { textContent: `${show(name)}: ${show(reason)}` })))));
  return parts;
}
