// The camera: live predictions, taking pictures, and recording frames for a class.
import { $, bar, count, el, percent, show } from "./dom.js";
import { picker } from "./files.js";
import { pause, send } from "./http.js";
import { page, locked } from "./state.js";
import { put } from "./teach.js";

const FEW = 8; // up to this many classes have fixed bars; of more, the likeliest are shown
const EVERY = 200; // milliseconds between two recorded frames
const VIDEO = { facingMode: "environment", width: { ideal: 640 }, height: { ideal: 480 } };
let stream = null, recording = null; // the current video stream and recording

// act: called with a picture that is taken; label: the class to record for.
export async function shoot(act, label = "") {
  if (!navigator.mediaDevices) return picker({ accept: "image/*", capture: "environment", multiple: false }, act); // no https
  stream = await navigator.mediaDevices.getUserMedia({ video: VIDEO }).catch(() => {
    throw new Error("the camera cannot be used; the browser may ask for permission first");
  });
  $("video").srcObject = stream;
  $("shoot-take").onclick = () => take(act);
  $("shoot").onclose = close;
  $("record").hidden = locked();
  $("record-name").value = label;
  note("");
  $("live").replaceChildren();
  $("live-label").textContent = $("live-rate").textContent = "";
  $("shoot").showModal();
  await $("video").play();
  watch(stream);
}

function close() {
  recording = null;
  stream.getTracks().forEach((track) => track.stop());
  stream = $("video").srcObject = null;
}

async function take(act) {
  const file = await frame();
  if (file) act([{ file, folders: [] }]);
  note("Picture taken");
}

// The current frame; null if the camera was closed meanwhile.
async function frame() {
  const video = $("video");
  while (stream && !video.videoWidth) await pause(20);
  if (!stream) return null;
  const canvas = el("canvas", { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext("2d").drawImage(video, 0, 0);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return new File([blob], `camera ${new Date().toISOString().slice(0, 23).replace("T", " ").replaceAll(":", ".")}.jpg`, { type: blob.type });
}

// ---------------------------------------------------------------------------------------------------------------- live

// Predict one frame after the other while this stream is shown.
async function watch(mine) {
  const times = [];
  while (stream === mine) {
    const classes = page.model ? page.model.classes.length : 0;
    if (!classes) { await pause(EVERY); continue; }
    const form = new FormData(), file = await frame();
    if (!file) return;
    form.append("images", file);
    try {
      const { predictions } = await send(`predict?top=${classes > FEW ? 5 : FEW}`, form);
      if (stream === mine && predictions.length) drawLive(predictions[0], classes);
    } catch (error) {
      if (stream === mine) drawProblem(error.message);
      await pause(1000);
    }
    times.push(performance.now());
    if (times.length > 10) times.shift();
    const rate = (1000 * (times.length - 1)) / (times.at(-1) - times[0]);
    if (rate) $("live-rate").textContent = `${rate.toFixed(rate < 10 ? 1 : 0)} answers a second`;
  }
}

function drawLive(found, classes) {
  const order = new Map(page.model.classes.map(({ name }, i) => [name, i]));
  const top = classes > FEW ? found.top : [...found.top].sort((one, other) => order.get(one.label) - order.get(other.label));
  const verdict = found.unknown ? "Unknown: unlike all classes" : show(found.label);
  if ($("live-label").textContent !== verdict) $("live-label").textContent = verdict; // screen readers announce only changes
  const rows = $("live").children;
  while (rows.length > top.length) rows[rows.length - 1].remove();
  while (rows.length < top.length) $("live").append(el("li", {}, el("span"), bar(0), el("b")));
  top.forEach(({ label, confidence }, i) => {
    const [name, meter, number] = rows[i].children;
    name.textContent = name.title = show(label);
    meter.firstChild.style.width = `${confidence * 100}%`;
    number.textContent = `${Math.round(confidence * 100)} %`;
    rows[i].ariaLabel = `${show(label)}, ${percent(confidence * 100)}`;
    rows[i].classList.toggle("first", label === found.top[0].label);
  });
}

function drawProblem(text) {
  $("live").replaceChildren();
  $("live-label").textContent = show(text);
}

// -------------------------------------------------------------------------------------------------------------- record

const note = (text) => { $("record-note").textContent = text; };

// Record frames for a class until the button is released, then collect them for teaching.
async function record() {
  const label = $("record-name").value.trim().normalize("NFC");
  if (recording || !$("record-name").reportValidity()) return;
  const frames = [], mine = (recording = {});
  $("record-hold").classList.add("on");
  for (let file; recording === mine && (file = await frame()); await pause(EVERY)) {
    frames.push(file);
    note(`Recording: ${count(frames.length, "image")}`);
  }
  $("record-hold").classList.remove("on");
  const kept = await put(label, frames);
  note(kept?.length ? `${count(kept.length, "image")} of ${show(label)} collected for teaching` : "Not collected");
}

export function recordable() {
  const hold = $("record-hold"), stop = () => { recording = null; };
  const keys = ["Enter", " "];
  $("record").onsubmit = (event) => event.preventDefault();
  hold.onpointerdown = (event) => { if (!event.button) { hold.setPointerCapture(event.pointerId); record(); } };
  hold.onpointerup = hold.onpointercancel = hold.onblur = stop;
  hold.oncontextmenu = (event) => event.preventDefault(); // a long press on a phone
  hold.onkeydown = (event) => { if (keys.includes(event.key)) { event.preventDefault(); if (!event.repeat) record(); } };
  hold.onkeyup = (event) => { if (keys.includes(event.key)) stop(); };
}
