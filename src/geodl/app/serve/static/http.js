// Requests to the server, the token, and the dialog that asks for it.
import { $, el, show, notify } from "./dom.js";

const API = "/api/v1/";

export const token = {
  changed: () => {}, // called with every new token
  get: () => sessionStorage.getItem("token") || "",
  set(value) { sessionStorage.setItem("token", value); token.changed(); },
};

const authorized = () => (token.get() ? { Authorization: `Bearer ${token.get()}` } : {});

async function answered(response) {
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (response.ok) return answer;
  if (response.status === 401) askToken("This token is wrong.");
  throw Object.assign(new Error(answer.error || `the server answered ${response.status}`), { status: response.status });
}

export async function call(path, body, way = "POST") {
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

export const get = (path) => call(path, undefined, "GET");

export const attempt = (act) => async (...args) => {
  try {
    notify("", true);
    return await act(...args);
  } catch (error) {
    notify(error.message, true);
    return null;
  }
};

// A file upload with progress, which fetch does not report.
export function send(path, form, progress = () => {}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", API + path);
    for (const [name, value] of Object.entries(authorized())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => event.lengthComputable && progress(event.loaded / event.total);
    request.onerror = () => reject(new Error("the server does not answer, or refused an upload of this size"));
    request.onload = () => answered(new Response(request.responseText, { status: request.status })).then(resolve, reject);
    request.send(form);
  });
}

export const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

export function save(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

export async function download(path, control) {
  const text = control.textContent;
  control.disabled = true;
  control.textContent = "Preparing…";
  try {
    const response = await fetch(API + path, { headers: authorized() });
    if (!response.ok) return void (await answered(response));
    const name = /filename\*?=(?:utf-8'')?"?([^";]+)/i.exec(response.headers.get("content-disposition") || "");
    save(await response.blob(), name ? decodeURIComponent(name[1]) : path);
  } finally {
    control.disabled = false;
    control.textContent = text;
  }
}

// Read the event stream until the page closes, with the token if there is one: some events need it.
export async function listen(update, lost) {
  let listening = new AbortController();
  token.changed = () => listening.abort();
  for (;;) {
    listening = new AbortController();
    try {
      const response = await fetch(API + "events", { headers: authorized(), signal: listening.signal });
      const reader = response.ok && response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part; reader && !(part = await reader.read()).done; ) {
        const messages = (text + part.value).split("\n\n");
        text = messages.pop();
        messages.filter((each) => each.startsWith("data: ")).forEach((each) => update(JSON.parse(each.slice(6))));
      }
    } catch {
      if (listening.signal.aborted) continue; // another token
    }
    lost();
    await pause(2000);
  }
}

// ------------------------------------------------------------------------------------------------------------- dialogs

export function ask({ title, text = "", value = null, check = "", yes, kind = "text" }) {
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

export async function askToken(text = "") {
  if ($("ask").open) return false;
  const found = await ask({
    title: "Token", text: text || "Changing the model needs the token that the server printed at its start.",
    value: "", yes: "Use it", kind: "password",
  });
  if (found) token.set(found.value.trim());
  return found !== null;
}

export const writable = async () => token.get() !== "" || (await askToken());
