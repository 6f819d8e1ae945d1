// Predicts images and camera pictures in the browser: nothing is sent anywhere.
import * as ort from "./ort.wasm.min.mjs";
import { seen } from "./resize.js";

const $ = (id) => document.getElementById(id);
const BARS = 5; // the most classes shown

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
const opening = open();

async function open() {
  const about = await (await fetch("./model.json")).json();
  const session = await ort.InferenceSession.create("./model.onnx", { executionProviders: ["wasm"] });
  document.title = about.name;
  $("name").textContent = about.name;
  $("lead").textContent = `Distinguishes ${about.labels.length} classes. Images stay on this device.`;
  return { about, session };
}

// The pixels of a picture or a camera frame; transparent ones become white.
function pixels(source, width, height) {
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0);
  return { data: context.getImageData(0, 0, width, height).data, width, height, step: 4 };
}

let busy = Promise.resolve(); // a session predicts one image at a time

// The confidences of all classes, the highest first, and whether the image is unlike all classes.
function recognize(image) {
  busy = busy.catch(() => {}).then(async () => {
    const { about, session } = await opening, { size } = about;
    const input = new ort.Tensor("uint8", seen(image, about.shorter_side, size, about.whole), [1, 3, size, size]);
    const outputs = await session.run({ pixels: input });
    const top = Array.from(outputs[about.output].data, (confidence, i) => ({ label: about.labels[i], confidence }));
    return { top: top.sort((one, other) => other.confidence - one.confidence), unknown: Boolean(about.unknown && outputs[about.unknown].data[0]) };
  });
  return busy;
}

// ------------------------------------------------------------------------------------------------------------- drawing

function el(tag, settings = {}, ...children) {
  const made = Object.assign(document.createElement(tag), settings);
  made.append(...children);
  return made;
}

function draw(place, { top, unknown }) {
  const verdict = el("strong", { textContent: unknown ? "Unknown: unlike all classes" : top[0].label });
  const bars = top.slice(0, BARS).map(({ label, confidence }) => {
    const inner = el("i");
    inner.style.width = `${confidence * 100}%`;
    return el("li", {}, el("span", { textContent: label }), el("i", {}, inner), el("b", { textContent: `${Math.round(confidence * 100)} %` }));
  });
  place.replaceChildren(verdict, el("ul", { className: "bars", ariaLabel: "Likeliest classes" }, ...bars));
}

async function look(file) {
  const body = el("div", {}, el("p", { className: "muted", textContent: "predicting…" }));
  const picture = el("img", { className: "picture", src: URL.createObjectURL(file), alt: file.name });
  const item = el("li", {}, picture, body);
  $("results").prepend(item);
  try {
    // Upright, and with colors as stored: as Pillow decodes it.
    const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
    const found = await recognize(pixels(bitmap, bitmap.width, bitmap.height));
    bitmap.close();
    Object.assign(item.dataset, { name: file.name, label: found.unknown ? "unknown" : found.top[0].label, nearest: found.top[0].label, confidence: found.top[0].confidence });
    draw(body, found);
  } catch (error) {
    item.dataset.name = file.name;
    body.replaceChildren(el("p", { className: "flaw", textContent: error instanceof DOMException ? "This browser cannot read the image." : error.message }));
  }
}

async function all(files) {
  for (const file of files) await look(file);
}

// -------------------------------------------------------------------------------------------------------------- camera

let stream = null;

async function watch() {
  if (stream) return stop();
  stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  const video = $("video");
  video.srcObject = stream;
  $("live").hidden = false;
  $("camera").textContent = "Stop the camera";
  await video.play();
  while (stream) {
    const found = await recognize(pixels(video, video.videoWidth, video.videoHeight));
    if (stream) draw($("now"), found);
    await new Promise(requestAnimationFrame);
  }
}

function stop() {
  stream.getTracks().forEach((track) => track.stop());
  stream = null;
  $("live").hidden = true;
  $("camera").textContent = "Camera";
}

const problem = (error) => { $("problem").textContent = error.message; $("problem").hidden = false; };

opening.catch(problem);
$("camera").hidden = !navigator.mediaDevices; // browsers allow it only over https
$("camera").onclick = () => watch().catch((error) => { stream = null; problem(error); });
$("choose").onclick = () => $("file").click();
$("file").onchange = () => { all([...$("file").files]); };
document.addEventListener("paste", (event) => all([...event.clipboardData.files]));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); all([...event.dataTransfer.files]); });
