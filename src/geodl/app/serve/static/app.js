// The page: its set-up, and its update at every event of the server.
import { $, notify } from "./dom.js";
import { recordable, shoot } from "./camera.js";
import { chosen, droppable } from "./files.js";
import { askToken, attempt, download, listen, token } from "./http.js";
import { loadPictures } from "./learned.js";
import { drawAccess, load, revert } from "./model.js";
import { clear, follow, recognize, saveTable, turn } from "./results.js";
import { page } from "./state.js";
import { drawJobs, loadTray, put, sort, teach } from "./teach.js";

let tray = null; // the version of the tray that is shown
let kept = null; // the state whose pictures are shown, and whether with the token

async function update(event) {
  notify(event.busy ? "Another program is changing the model; its result will show here." : "");
  page.jobs = event.jobs;
  const changed = event.state !== page.state;
  page.state = event.state;
  if (event.tray !== tray) { tray = event.tray; loadTray(tray !== undefined); }
  drawJobs();
  drawAccess();
  if (changed) {
    page.round += 1;
    await load();
    follow();
  }
  const now = `${event.state} ${event.tray !== undefined}`;
  if (kept === now) return;
  kept = now;
  await loadPictures();
}

function lost() {
  page.state = tray = kept = null;
  notify("The server does not answer; trying again.");
}

function start() {
  const secret = new URLSearchParams(location.hash.slice(1)).get("token");
  if (secret) {
    token.set(secret);
    history.replaceState(null, "", location.pathname); // so that it is neither visible nor bookmarked
  }
  $("choose").onclick = () => $("file").click();
  $("file").onchange = () => { recognize(chosen($("file"))); $("file").value = ""; };
  $("camera").onclick = attempt(() => shoot(recognize));
  $("filter").onchange = follow;
  $("earlier").onclick = () => turn(-1);
  $("later").onclick = () => turn(1);
  $("csv").onclick = saveTable;
  $("shoot-close").onclick = () => $("shoot").close();
  recordable();
  $("clear").onclick = clear;
  $("ask-no").onclick = () => $("ask").close("no");
  $("unlock").onclick = () => askToken();
  $("go").onclick = teach;
  $("undo").onclick = revert("undo", "Undone");
  $("redo").onclick = revert("redo", "Redone");
  $("onnx").onclick = attempt(() => download("export/onnx", $("onnx")));
  $("report").onclick = attempt(() => download("export/report", $("report")));
  $("new-class").onsubmit = (event) => {
    event.preventDefault();
    const name = $("new-name").value.trim().normalize("NFC");
    if (name) put(name, []);
    $("new-name").value = "";
  };
  droppable($("recognize"), recognize);
  droppable($("teach"), (found) => sort(found, ""));
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData ? event.clipboardData.files : [])];
    if (files.length) recognize(files.map((file) => ({ file, folders: [] })));
  });
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault()); // a file dropped elsewhere must not be opened
  listen(update, lost);
}

start();
