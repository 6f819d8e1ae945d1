// Names what is under the pointer, enlarges matrices, and opens what is folded before printing. The page is complete without it.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const near = 28; // pixels from a point within which it is named

  function show(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  }

  function cell(tips, box, x, y) {
    const [rows, columns] = tips.shape;
    const i = Math.floor(((y - box.top) / box.height) * rows);
    const j = Math.floor(((x - box.left) / box.width) * columns);
    if (i < 0 || j < 0 || i >= rows || j >= columns) return null;
    if (tips.values) {
      const value = tips.values[i][j];
      return value === null ? null : `${tips.rows[i]}\n${tips.columns[j]}: ${value} %`;
    }
    const count = tips.cells.get(i * columns + j) ?? 0;
    const share = ((100 * count) / Math.max(tips.totals[i], 1)).toFixed(1);
    const what = i === j ? "correct" : `predicted as ${tips.columns[j]}`;
    return `${tips.rows[i]}\n${what}: ${count} (${share} %)`;
  }

  function point(svg, prefix, tips, x, y) {
    let best = null;
    let least = near;
    for (const [line, texts] of Object.entries(tips)) {
      const marks = svg.querySelectorAll(`[id="${prefix}-${line}"] use`);
      marks.forEach((mark, i) => {
        const box = mark.getBoundingClientRect();
        const distance = Math.hypot(box.left + box.width / 2 - x, box.top + box.height / 2 - y);
        if (distance < least && texts[i]) [least, best] = [distance, texts[i]];
      });
    }
    return best;
  }

  for (const plot of document.querySelectorAll(".plot")) {
    const svg = plot.querySelector("svg");
    const tips = JSON.parse(plot.querySelector("script").textContent);
    const image = tips.heat && svg.querySelector(`[id="${plot.dataset.prefix}-heat"]`);
    if (tips.heat?.entries) {
      const columns = tips.heat.shape[1];
      tips.heat.cells = new Map(tips.heat.entries.map(([i, j, count]) => [i * columns + j, count]));
    }
    const find = (event) => {
      const [x, y] = [event.clientX, event.clientY];
      const text = image ? cell(tips.heat, image.getBoundingClientRect(), x, y) : point(svg, plot.dataset.prefix, tips, x, y);
      if (text) show(text, x, y);
      else tip.hidden = true;
    };
    svg.addEventListener("pointermove", find);
    svg.addEventListener("pointerdown", find);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    const button = plot.querySelector("button");
    button?.addEventListener("click", () => {
      const zoomed = plot.querySelector(".canvas").classList.toggle("zoomed");
      svg.style.width = zoomed ? `${button.dataset.zoom}px` : "";
      plot.style.gridColumn = zoomed ? "1 / -1" : "";
      button.textContent = zoomed ? "fit" : "enlarge";
      button.setAttribute("aria-pressed", String(zoomed));
      plot.scrollIntoView({ block: "nearest" });
    });
  }

  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details:not(.research)")) folded.open = true;
  });
})();
