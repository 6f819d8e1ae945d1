// Files and folders that are dropped or chosen.
import { el } from "./dom.js";

// Return [{file, folders}] of what was dropped; folders: the names of the folders above the file.
export async function dropped(transfer) {
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

export const chosen = (input) =>
  [...input.files].map((file) => ({ file, folders: (file.webkitRelativePath || "").split("/").slice(0, -1) }));

export function droppable(target, act) {
  target.addEventListener("dragover", (event) => { event.preventDefault(); event.stopPropagation(); target.classList.add("over"); });
  target.addEventListener("dragleave", () => target.classList.remove("over"));
  target.addEventListener("drop", async (event) => {
    event.preventDefault();
    event.stopPropagation();
    target.classList.remove("over");
    act(await dropped(event.dataTransfer));
  });
}

export function picker(settings, act) {
  const input = el("input", { type: "file", multiple: true, ...settings });
  input.addEventListener("change", () => act(chosen(input)));
  input.click();
}
