"use strict";
(() => {
  const LEFT = 46, RIGHT = 44, WIDTH = 420;  // as in chart.py
  const root = document.documentElement;

  // Light, dark, or as the system has it.
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // A click on a column's name sorts by it; numbers as numbers, what has none last.
  function sortBy(button) {
    const header = button.closest("th"), table = button.closest("table"), body = table.tBodies[0];
    const column = header.cellIndex, down = header.getAttribute("aria-sort") !== "descending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => { const v = row.cells[column].dataset.v; return v === undefined ? row.cells[column].textContent : v === "" ? null : Number(v); };
    const rows = [...body.rows].map(row => [key(row), row]);
    rows.sort(([a], [b]) => a === null ? 1 : b === null ? -1 : (typeof a === "number" ? a - b : String(a).localeCompare(b)) * (down ? -1 : 1));
    body.append(...rows.map(([, row]) => row));
  }

  // Values under the pointer, or under the arrow keys.
  function show(figure, round) {
    const data = JSON.parse(figure.querySelector("script").textContent), svg = figure.querySelector("svg");
    const [x0, x1] = svg.dataset.x.split(" ").map(Number);
    const all = [...new Set(data.flatMap(s => s.x))].sort((a, b) => a - b);
    const x = all.reduce((best, n) => Math.abs(n - round) < Math.abs(best - round) ? n : best, all[0]);
    const place = LEFT + (WIDTH - LEFT - RIGHT) * (x - x0) / (x1 - x0);
    const cross = svg.querySelector(".cross");
    cross.removeAttribute("hidden");
    cross.setAttribute("transform", `translate(${place} 0)`);
    let tip = figure.querySelector(".tip");
    if (!tip) { tip = document.createElement("div"); tip.className = "tip"; tip.setAttribute("role", "status"); figure.append(tip); }
    const lines = data.map(s => [s.name, s.x.indexOf(x), s]).filter(([, i]) => i >= 0).map(([name, i, s]) => `${name}: ${s.text[i]}`);
    tip.replaceChildren(...[`round ${x.toLocaleString("en")}`, ...lines].map(text => { const div = document.createElement("div"); div.textContent = text; return div; }));
    const box = svg.getBoundingClientRect(), own = figure.getBoundingClientRect();
    const left = box.left - own.left + place / WIDTH * box.width;
    tip.style.top = `${box.top - own.top + 8}px`;
    tip.style.left = place > WIDTH / 2 ? "auto" : `${left + 10}px`;
    tip.style.right = place > WIDTH / 2 ? `${own.width - left + 10}px` : "auto";
    figure.dataset.at = all.indexOf(x);
    return all;
  }
  function hide(figure) {
    figure.querySelector(".cross").setAttribute("hidden", "");
    figure.querySelector(".tip")?.remove();
    delete figure.dataset.at;
  }
  const chart = event => event.target.closest?.("figure.chart");
  document.addEventListener("pointermove", event => {
    const figure = chart(event), svg = figure?.querySelector("svg");
    for (const other of document.querySelectorAll("figure.chart[data-at]")) if (other !== figure && other !== document.activeElement) hide(other);
    if (!svg) return;
    const box = svg.getBoundingClientRect(), [x0, x1] = svg.dataset.x.split(" ").map(Number);
    show(figure, x0 + (x1 - x0) * ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT));
  });
  document.addEventListener("focusout", event => { const figure = chart(event); if (figure) hide(figure); });
  document.addEventListener("keydown", event => {
    const figure = chart(event);
    if (!figure || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return hide(figure);
    const all = [...new Set(JSON.parse(figure.querySelector("script").textContent).flatMap(s => s.x))].sort((a, b) => a - b);
    const at = figure.dataset.at === undefined ? -1 : Number(figure.dataset.at);
    const next = { ArrowLeft: at < 0 ? all.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    show(figure, all[Math.min(Math.max(next, 0), all.length - 1)]);
  });
  document.addEventListener("click", event => { const button = event.target.closest?.("th button"); if (button) sortBy(button); });
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; for (const d of opened) d.open = true; });
  addEventListener("afterprint", () => { for (const d of opened) d.open = false; });

  // On the board: look again every two seconds, and keep what is unfolded, sorted and focused.
  const main = document.querySelector("main");
  if (!main.dataset.live) return;
  let tag = null;
  setInterval(async () => {
    if (document.hidden || document.querySelector("figure.chart[data-at]")) return;
    try {
      const answer = await fetch(location.href, { headers: { "X-Part": "main", ...(tag ? { "If-None-Match": tag } : {}) }, cache: "no-store" });
      document.getElementById("lost").hidden = answer.ok || answer.status === 304;
      if (answer.status !== 200) return;
      tag = answer.headers.get("ETag");
      const open = [...main.querySelectorAll("details[open]")].map(d => d.id), focus = document.activeElement?.id;
      const sorted = [...main.querySelectorAll("th[aria-sort]")].map(th => [th.querySelector("button").id, th.getAttribute("aria-sort")]);
      main.innerHTML = await answer.text();
      for (const id of open) { const d = document.getElementById(id); if (d) d.open = true; }
      for (const [id, order] of sorted) { const b = document.getElementById(id); if (b) { sortBy(b); if (order === "ascending") sortBy(b); } }
      if (focus) document.getElementById(focus)?.focus();
    } catch { document.getElementById("lost").hidden = false; }
  }, 2000);
})();
