"use strict";
// Everything that comes from a person or a model is shown as text, never as markup.

const $ = (id) => document.getElementById(id);
const API = "/api/v1/";
const BATCH = 8; // images in one request to recognize
const SHOWN = 23; // thumbnails of a class
const MOST = 100; // results kept on the page

let listening = null; // what ends the event stream
const page = { model: null, jobs: [], trays: new Map(), mine: new Map(), boxes: new Map(), dismissed: new Set(), state: null };

// ------------------------------------------------------------------------------------------------------------ elements

// Characters that would act instead of being shown are shown as their escapes.
const hidden = /[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069\ufffe\uffff]/g;
const show = (text) => String(text).replace(hidden, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));

function el(tag, settings = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name === "on") for (const [kind, act] of Object.entries(value)) made.addEventListener(kind, act);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const button = (text, act, settings = {}) => el("button", { type: "button", textContent: text, ...settings, on: { click: act } });
const count = (number, what) => `${number} ${number === 1 ? what : what.endsWith("s") ? what + "es" : what + "s"}`;
const percent = (value) => (value === null || value === undefined ? "not measured" : `${value.toFixed(value === 100 ? 0 : 1)} %`);
const when = (time) => (time ? new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "");

function bar(part) {
  const inner = el("i");
  inner.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  return el("i", { ariaHidden: "true" }, inner);
}

// Draw anew; whoever was on a button that is gone finds themselves on the same one, or on what stands for it.
function redraw(draw, instead) {
  const before = document.activeElement, label = before && before.ariaLabel;
  draw();
  if (!before || before.isConnected) return;
  const same = label && [...document.querySelectorAll("button")].find((each) => each.ariaLabel === label);
  (same || $(instead)).focus();
}

function tell(text, bad = false) {
  const place = $(bad ? "problem" : "notice");
  place.textContent = text ? show(text) : "";
  place.hidden = !text;
  if (text && bad) place.scrollIntoView({ block: "nearest" });
}

// ---------------------------------------------------------------------------------------------------------------- HTTP

const token = {
  get: () => sessionStorage.getItem("token") || "",
  set(value) { sessionStorage.setItem("token", value); drawAccess(); listening?.abort(); },
};

const authorized = () => (token.get() ? { Authorization: `Bearer ${token.get()}` } : {});

async function answered(response) {
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (response.ok) return answer;
  if (response.status === 401) askToken("This token is not the right one.");
  throw Object.assign(new Error(answer.error || `the server answered ${response.status}`), { status: response.status });
}

async function call(path, body, way = "POST") {
  const headers = { ...authorized() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(API + path, { method: way, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Error("the server does not answer");
  }
  return answered(response);
}

const attempt = (act) => async (...given) => {
  try {
    tell("", true);
    return await act(...given);
  } catch (error) {
    tell(error.message, true);
    return null;
  }
};

// A file upload that tells how far it is; fetch cannot.
function send(path, form, told) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", API + path);
    for (const [name, value] of Object.entries(authorized())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && told(event.loaded / event.total);
    request.onerror = () => reject(new Error("the server does not answer, or refused so much at once"));
    request.onload = () => answered(new Response(request.responseText, { status: request.status })).then(resolve, reject);
    request.send(form);
  });
}

async function download(path, control) {
  const text = control.textContent;
  control.disabled = true;
  control.textContent = "Preparing…";
  try {
    const response = await fetch(API + path, { headers: authorized() });
    if (!response.ok) return void (await answered(response));
    const name = /filename\*?=(?:utf-8'')?"?([^";]+)/i.exec(response.headers.get("content-disposition") || "");
    const link = el("a", { href: URL.createObjectURL(await response.blob()), download: name ? decodeURIComponent(name[1]) : path });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  } finally {
    control.disabled = false;
    control.textContent = text;
  }
}

// ------------------------------------------------------------------------------------------------------------- dialogs

function ask({ title, text = "", value = null, check = "", yes, kind = "text" }) {
  const dialog = $("ask"), input = $("ask-input");
  $("ask-title").textContent = show(title);
  $("ask-text").textContent = show(text);
  $("ask-yes").textContent = yes;
  input.hidden = value === null;
  input.type = kind;
  input.required = value !== null;
  input.value = value ?? "";
  input.setAttribute("aria-label", title);
  $("ask-check").hidden = !check;
  $("ask-box").checked = false;
  $("ask-box-text").textContent = check;
  dialog.returnValue = "no";
  dialog.showModal();
  if (value !== null) input.select();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? { value: input.value, checked: $("ask-box").checked } : null);
  });
}

async function askToken(text = "") {
  if ($("ask").open) return false;
  const found = await ask({
    title: "Token", text: text || "Whoever changes the model needs the token that the server printed at its start.",
    value: "", yes: "Use it", kind: "password",
  });
  if (found) token.set(found.value.trim());
  return found !== null;
}

const writable = async () => token.get() !== "" || (await askToken());

// --------------------------------------------------------------------------------------------------- files and folders

// Give [{file, folders}] of what was dropped; folders: the names of the folders above it.
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry && item.webkitGetAsEntry()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ file, folders: [] }));
  const found = [];
  for (const entry of entries) await walk(entry, [], found);
  return found;
}

async function walk(entry, folders, found) {
  if (entry.name.startsWith(".")) return;
  if (entry.isFile) {
    const file = await new Promise((resolve) => entry.file(resolve, () => resolve(null)));
    if (file) found.push({ file, folders });
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const some = await new Promise((resolve) => reader.readEntries(resolve, () => resolve([])));
    if (!some.length) return;
    for (const inner of some) await walk(inner, [...folders, entry.name], found);
  }
}

const chosen = (input) =>
  [...input.files].map((file) => ({ file, folders: (file.webkitRelativePath || "").split("/").slice(0, -1) }));

function droppable(target, act) {
  target.addEventListener("dragover", (event) => { event.preventDefault(); event.stopPropagation(); target.classList.add("over"); });
  target.addEventListener("dragleave", () => target.classList.remove("over"));
  target.addEventListener("drop", async (event) => {
    event.preventDefault();
    event.stopPropagation();
    target.classList.remove("over");
    act(await dropped(event.dataTransfer));
  });
}

function picker(settings, act) {
  const input = el("input", { type: "file", multiple: true, ...settings });
  input.addEventListener("change", () => act(chosen(input)));
  input.click();
}

// -------------------------------------------------------------------------------------------------------------- camera

async function shoot(act) {
  if (!navigator.mediaDevices) return picker({ accept: "image/*", capture: "environment", multiple: false }, act);
  const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } }).catch(() => {
    throw new Error("the camera cannot be used; the browser may ask for permission first");
  });
  const video = $("video");
  video.srcObject = stream;
  $("shoot-take").onclick = () => {
    const canvas = el("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => act([{ file: new File([blob], `camera ${new Date().toLocaleTimeString()}.jpg`, { type: "image/jpeg" }), folders: [] }]), "image/jpeg", 0.92);
  };
  $("shoot").onclose = () => stream.getTracks().forEach((track) => track.stop());
  $("shoot").showModal();
}

// --------------------------------------------------------------------------------------------------------- recognizing

async function recognize(found) {
  const cards = found.map(({ file }) => resultCard(file));
  $("results").prepend(...cards.map((card) => card.item));
  while ($("results").children.length > MOST) $("results").lastElementChild.remove();
  drawResultsHead();
  for (let start = 0; start < cards.length; start += BATCH) await predict(cards.slice(start, start + BATCH));
}

// Images that are too large together are sent one by one.
async function predict(cards) {
  const form = new FormData();
  for (const card of cards) form.append("images", card.file, card.file.name || "image");
  try {
    const answer = await send("predict?top=5&similar=true", form, () => {});
    const named = [...answer.skipped];
    const good = new Map(answer.predictions.map((each) => [each.index, each]));
    cards.forEach((card, i) => (good.has(i) ? drawResult(card, good.get(i)) : drawFlaw(card, named.shift()?.reason)));
  } catch (error) {
    if (error.status === 413 && cards.length > 1) for (const card of cards) await predict([card]);
    else cards.forEach((card) => drawFlaw(card, error.message));
  }
}

function resultCard(file) {
  const url = URL.createObjectURL(file);
  const body = el("div", {}, el("p", { className: "muted", textContent: "looking…" }));
  const item = el("li", {}, el("img", { className: "picture", src: url, alt: show(file.name || "image") }), body);
  return { file, body, item };
}

function drawResultsHead() {
  const shown = $("results").children.length;
  $("results-head").hidden = !shown;
  $("results-count").textContent = count(shown, "image");
}

function drawFlaw(card, reason) {
  card.body.replaceChildren(
    el("div", { className: "verdict" }, el("strong", { textContent: "Cannot be used" }), fileName(card.file)),
    el("p", { className: "flaw", textContent: show(reason || "not an image") }),
  );
}

const fileName = (file) => el("span", { className: "file", textContent: show(file.name || ""), title: show(file.name || "") });

function drawResult(card, found) {
  const locked = page.model && page.model.read_only;
  const bars = found.top.map(({ label, confidence }) =>
    el("li", {}, el("button", {
      type: "button", disabled: locked, ariaLabel: `${show(label)}, ${percent(confidence * 100)}${locked ? "" : ". Teach this image as " + show(label)}`,
      title: locked ? "" : `It is ${show(label)}: put the image into the tray to be taught`,
      on: { click: () => correct(card, label) },
    }, el("span", { textContent: show(label) }), bar(confidence), el("b", { textContent: `${Math.round(confidence * 100)} %` }))));
  const name = el("input", { placeholder: "Another class", ariaLabel: "The right class of this image", maxLength: 255, autocomplete: "off", required: true });
  name.setAttribute("list", "known");
  card.note = el("p", { className: "noted", role: "status", hidden: true });
  const fix = el("form", { className: "fix", hidden: locked, on: { submit: (event) => { event.preventDefault(); correct(card, name.value.trim()); name.value = ""; } } },
    name, el("button", { className: "small", textContent: "Correct" }));
  const similar = found.similar.map((each) => el("figure", {},
    el("img", { src: each.image, alt: `A stored image of ${show(each.label)}` }), el("figcaption", { textContent: show(each.label), title: show(each.label) })));
  card.body.replaceChildren(...[
    el("div", { className: found.unknown ? "verdict unknown" : "verdict" },
      el("strong", { textContent: found.unknown ? "Unknown: unlike all classes" : show(found.label) }), fileName(card.file)),
    el("ul", { className: "bars", ariaLabel: "Likeliest classes" }, ...bars), fix, card.note,
    similar.length ? el("p", { className: "near muted", textContent: "Nearest of the images it keeps" }) : null,
    similar.length ? el("div", { className: "similar" }, ...similar) : null,
  ].filter(Boolean));
}

// The image joins the tray of its right class, and leaves that of a wrong one.
function correct(card, label) {
  if (!label) return;
  for (const [other, items] of page.trays) page.trays.set(other, items.filter((item) => item.file !== card.file));
  put(label, [card.file]);
  for (const [other, items] of page.trays) if (!items.length && other !== label) page.trays.delete(other);
  drawTrays();
  card.note.textContent = `To be taught as ${show(label)}`;
  card.note.hidden = false;
}

// ------------------------------------------------------------------------------------------------------------ teaching

function put(label, files) {
  const tray = page.trays.get(label) || [];
  const there = new Set(tray.map(({ file }) => `${file.name} ${file.size} ${file.lastModified}`));
  const fresh = files.filter((file) => !there.has(`${file.name} ${file.size} ${file.lastModified}`));
  page.trays.set(label, [...tray, ...fresh.map((file) => ({ file, url: URL.createObjectURL(file), flaw: "", job: null }))]);
}

// Images in folders go to the classes that the folders are named after; others to the class they were dropped on.
function sort(found, label) {
  const deepest = Math.max(0, ...found.map(({ folders }) => folders.length));
  const top = new Set(found.map(({ folders }) => folders[0]));
  const level = deepest > 1 && top.size === 1 ? 1 : 0; // a folder of class folders, or class folders themselves
  const lost = [];
  for (const { file, folders } of found) {
    const name = label || folders[Math.min(level, folders.length - 1)];
    if (name) put(name.normalize("NFC"), [file]);
    else lost.push(file);
  }
  if (lost.length) tell(`${count(lost.length, "image")} without a class: drop them on a class, or in a folder named after it`, true);
  drawTrays();
}

function drawTrays() {
  redraw(() => $("trays").replaceChildren(...[...page.trays].map(([label, items]) => drawTray(label, items))), "new-name");
  const images = [...page.trays.values()].flat().filter((item) => !item.job).length;
  $("teach-foot").hidden = !page.trays.size;
  $("teach-hint").hidden = page.trays.size > 0;
  $("tray-count").textContent = images ? `${count(images, "image")} of ${count(page.trays.size, "class")}` : "";
  $("go").disabled = !images || sending;
  $("go").textContent = images ? `Teach ${count(images, "image")}` : "Teach";
}

function drawTray(label, items) {
  const known = page.model && page.model.classes.some((each) => each.name === label);
  const thumbs = items.slice(0, SHOWN).map((item) => {
    const name = show(item.file.name);
    const image = el("img", { src: item.url, alt: name, title: item.flaw ? `${name}: ${show(item.flaw)}` : name });
    const made = el("li", { className: item.flaw ? "broken" : item.job ? "given" : "" }, image,
      button("×", () => { page.trays.set(label, page.trays.get(label).filter((other) => other !== item)); drawTrays(); }, { ariaLabel: `Take ${name} out` }));
    image.addEventListener("error", () => { if (!item.flaw) { item.flaw = "the browser cannot show it"; drawTrays(); } });
    return made;
  });
  if (items.length > SHOWN) thumbs.push(el("li", { className: "more", textContent: `+${items.length - SHOWN}` }));
  const flaws = items.filter((item) => item.flaw);
  const tray = el("li", { className: "tray" },
    el("div", { className: "row" },
      el("strong", {}, show(label), " ", el("small", { textContent: `${count(items.length, "image")}${known ? ", known already" : ""}` })),
      button("×", () => { page.trays.delete(label); drawTrays(); }, { className: "quiet small", ariaLabel: `Drop the class ${show(label)}` })),
    items.length ? el("ul", { className: "thumbs", ariaLabel: `Images of ${show(label)}` }, ...thumbs) : el("p", { className: "muted hint", textContent: "Drop images here, or" }),
    ...flaws.slice(0, 5).map((item) => el("p", { className: "flaw", textContent: `${show(item.file.name)}: ${show(item.flaw)}` })),
    flaws.length > 5 ? el("p", { className: "flaw", textContent: `and ${flaws.length - 5} more` }) : null,
    el("div", { className: "row" }, el("div", { className: "row" },
      button("Add images", () => picker({ accept: "image/*" }, (found) => sort(found, label)), { className: "small", ariaLabel: `Add images to ${show(label)}` }),
      button("Folder", () => picker({ webkitdirectory: true }, (found) => sort(found, label)), { className: "small", ariaLabel: `Add a folder of images to ${show(label)}` }),
      button("Camera", attempt(() => shoot((found) => sort(found, label))), { className: "small", ariaLabel: `Take pictures for ${show(label)}` }))));
  droppable(tray, (found) => sort(found, label));
  return tray;
}

let sending = false;

const teach = attempt(async () => {
  if (sending || !(await writable())) return;
  const pairs = [...page.trays].flatMap(([label, items]) => items.filter((item) => !item.job).map((item) => [label, item]));
  const form = new FormData();
  for (const [label, item] of pairs) {
    form.append("images", item.file, item.file.name || "image");
    form.append("labels", label);
  }
  sending = true;
  drawTrays();
  const progress = el("progress", { max: 1, value: 0, ariaLabel: "Sending" });
  $("jobs").append(el("div", { className: "job" }, el("p", { textContent: `Sending ${count(pairs.length, "image")}` }), progress));
  try {
    const job = await send("learn", form, (part) => { progress.value = part; });
    page.mine.set(job.id, pairs);
    for (const [, item] of pairs) item.job = job.id;
  } finally {
    sending = false;
    drawJobs();
    drawTrays();
    $("jobs").scrollIntoView({ block: "nearest" });
  }
});

// A job that goes on is changed in place: a button that is being pressed must not be replaced.
function drawJobs() {
  if (sending) return;
  for (const job of page.jobs) if (page.mine.has(job.id)) settle(job);
  const shown = page.jobs.filter((job) => !page.dismissed.has(job.id) && (["waiting", "running"].includes(job.state) || page.mine.has(job.id)));
  const boxes = shown.map((job) => {
    const old = page.boxes.get(job.id), key = `${job.state} ${job.advice.length}`;
    const made = old && old.key === key ? old : { key, box: drawJob(job) };
    page.boxes.set(job.id, made);
    drawProgress(made.box, job);
    return made.box;
  });
  if (boxes.length !== $("jobs").children.length || boxes.some((box, i) => $("jobs").children[i] !== box)) $("jobs").replaceChildren(...boxes);
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

// What was taught leaves the trays; what could not be used stays there with its reason.
function settle(job) {
  const pairs = page.mine.get(job.id);
  if (!pairs.length || !["done", "failed", "cancelled"].includes(job.state)) return;
  page.mine.set(job.id, []);
  const reasons = new Map(job.skipped.map(({ name, reason }) => [name, reason]));
  for (const [label, item] of pairs) {
    item.job = null;
    item.flaw = reasons.get(`${show(label)}/${show(item.file.name)}`) || "";
    if (job.state === "done" && !item.flaw && page.trays.has(label)) page.trays.set(label, page.trays.get(label).filter((other) => other !== item));
  }
  for (const [label, items] of page.trays) if (!items.length && pairs.some((pair) => pair[0] === label)) page.trays.delete(label);
  drawTrays();
}

function drawJob(job) {
  const what = classesOf(job), box = el("div", { className: `job ${job.state}`, role: "group", ariaLabel: `Teaching ${what}` });
  const dismiss = button("Dismiss", () => { page.dismissed.add(job.id); drawJobs(); }, { className: "quiet small" });
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
  parts.push(el("p", {}, el("strong", { textContent: result.already ? "Exactly these images were learned in the last step." : `Learned ${learned} from ${count(result.images, "image")}.` })));
  const judged = result.left_out ? "images, each judged by the model without it" : "images that were set aside to check";
  if (result.accuracy !== null) parts.push(el("p", { textContent: `It recognizes ${percent(result.accuracy)} of ${result.judged} ${judged}.` }));
  for (const warning of result.warnings) parts.push(el("p", { className: "muted", textContent: show(warning) }));
  if (job.skipped.length) parts.push(el("details", { open: true }, el("summary", { textContent: `${count(job.skipped.length, "file")} left out` }),
    el("ul", {}, ...job.skipped.slice(0, 50).map(({ name, reason }) => el("li", { textContent: `${show(name)}: ${show(reason)}` })))));
  return parts;
}

// ----------------------------------------------------------------------------------------------------------- the model

const change = (path, body) => attempt(async () => {
  if (!(await writable())) return;
  await call(path, body);
  await load();
});

const load = attempt(async () => {
  page.model = await call("model", undefined, "GET");
  drawModel();
});

function drawAccess() {
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
  $("mixed").hidden = !model.confusions.length;
  $("confusions").replaceChildren(...model.confusions.map((each) => el("li", {}, el("strong", { textContent: show(each.class) }), " taken for ", el("strong", { textContent: show(each.taken_for) }), `: ${each.images} of ${each.of}`)));
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
  const actions = page.model.read_only ? null : el("div", { className: "row" },
    button("Rename", () => rename(known.name), { className: "quiet small", ariaLabel: `Rename ${show(known.name)}` }),
    button("Remove", () => removeClass(known.name), { className: "quiet small danger", ariaLabel: `Remove ${show(known.name)}` }));
  const accuracy = known.accuracy === null ? `${count(known.images, "image")}` : `${percent(known.accuracy)} · ${count(known.images, "image")}`;
  return el("li", {}, el("strong", { textContent: show(known.name) }), actions,
    el("div", { className: "meter", title: known.accuracy === null ? "Accuracy is not measured: too few images" : `Accuracy on ${count(known.validation, "validation image")}` }, bar((known.accuracy ?? 0) / 100), el("span", { className: "muted", textContent: accuracy })));
}

function drawStep(step) {
  const what = {
    learn: () => `Learned ${[...step.new, ...step.returning].map(show).join(", ")} from ${count(step.images, "image")}${step.accuracy === null ? "" : `: ${percent(step.accuracy)} accuracy`}`,
    rename: () => `Renamed ${show(step.old)} to ${show(step.new)}`,
    remove: () => `Removed ${show(step.class)}`,
    relabel: () => `Moved an image from ${show(step.old)} to ${show(step.new)}`,
    forget: () => `Forgot ${count(step.images, "image")}`,
  }[step.action];
  return el("li", {}, el("time", { textContent: when(step.time) }), el("span", { textContent: what ? what() : show(step.action) }));
}

async function rename(old) {
  const found = await ask({ title: `Rename ${old}`, text: "What shall the class be called?", value: old, yes: "Rename" });
  if (found && found.value !== old) await change("classes/rename", { old, new: found.value.trim() })();
}

async function removeClass(name) {
  const found = await ask({ title: `Remove ${name}?`, text: "The model will no longer know this class. Undo brings it back.", check: "For good: no image of it is kept anywhere, and there is no undo", yes: "Remove" });
  if (found) await change("classes/remove", { name, for_good: found.checked })();
}

// --------------------------------------------------------------------------------------------------------------- start

// Read the event stream with the token, if there is one: only its owner is told why teaching failed.
async function listen() {
  for (;;) {
    listening = new AbortController();
    try {
      const response = await fetch(API + "events", { headers: authorized(), signal: listening.signal });
      const reader = response.ok && response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part; reader && !(part = await reader.read()).done; ) {
        const messages = (text + part.value).split("\n\n");
        text = messages.pop();
        messages.filter((each) => each.startsWith("data: ")).forEach((each) => heard(JSON.parse(each.slice(6))));
      }
    } catch {
      if (listening.signal.aborted) continue; // another token
    }
    tell("The server does not answer; trying again.");
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function heard(told) {
  tell(told.busy ? "Another program is changing the model; its result will show here." : "");
  page.jobs = told.jobs;
  if (told.state !== page.state) { page.state = told.state; load(); }
  drawJobs();
}

function start() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    token.set(given);
    history.replaceState(null, "", location.pathname); // so that it is neither seen nor kept as a bookmark
  }
  $("choose").onclick = () => $("file").click();
  $("file").onchange = () => { recognize(chosen($("file"))); $("file").value = ""; };
  $("camera").onclick = attempt(() => shoot(recognize));
  $("shoot-close").onclick = () => $("shoot").close();
  $("clear").onclick = () => { $("results").replaceChildren(); drawResultsHead(); };
  $("ask-no").onclick = () => $("ask").close("no");
  $("unlock").onclick = () => askToken();
  $("go").onclick = teach;
  $("undo").onclick = change("undo");
  $("redo").onclick = change("redo");
  $("onnx").onclick = attempt(() => download("export/onnx", $("onnx")));
  $("report").onclick = attempt(() => download("export/report", $("report")));
  $("new-class").onsubmit = (event) => {
    event.preventDefault();
    const name = $("new-name").value.trim().normalize("NFC");
    if (name) put(name, []);
    $("new-name").value = "";
    drawTrays();
  };
  droppable($("recognize"), recognize);
  droppable($("teach"), (found) => sort(found, ""));
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData ? event.clipboardData.files : [])];
    if (files.length) recognize(files.map((file) => ({ file, folders: [] })));
  });
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault()); // never open a file that missed
  listen();
}

start();
