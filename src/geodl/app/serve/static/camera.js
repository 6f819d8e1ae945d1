// The camera.
import { $, el } from "./dom.js";
import { picker } from "./files.js";

export async function shoot(act) {
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
