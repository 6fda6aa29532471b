// Refreshes the screen and draws curves. Everything can be read without it.
"use strict";
(() => {
  const SECONDS = 5;
  const COLOURS = ["#3b82c4", "#d97b29", "#3f9d5a", "#c4525c", "#8a76c9", "#a8922f", "#2f9aa0", "#b565ab"];
  const plots = new Map();

  const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // All times are UTC, as in the tables.
  const utc = (at) => new Date(at * 1000).toISOString();
  const tick = (at, number, all, step) => {
    const day = utc(at).slice(0, 10);
    if (step >= 86400) return day;
    const time = utc(at).slice(11, step < 60 ? 19 : 16);
    return number > 0 && utc(all[number - 1]).startsWith(day) ? time : `${time}\n${day}`;
  };

  async function draw(box) {
    let found;
    try {
      const answer = await fetch(box.dataset.curve, { credentials: "same-origin" });
      if (!answer.ok) return;
      found = await answer.json();
    } catch {
      return; // the next time, perhaps
    }
    if (!found.data[0] || found.data[0].length < 2) {
      if (!plots.has(box)) box.textContent = "Not enough is known yet.";
      return;
    }
    const known = plots.get(box);
    if (known && known.series.slice(1).map((one) => one.label).join("\n") === found.series.join("\n")) {
      known.setData(found.data);
      return;
    }
    if (known) known.destroy();
    box.textContent = "";
    const own = box.dataset.axes === "own"; // loss and speed: an axis each
    const axis = { stroke: token("--ink"), grid: { stroke: token("--line") } };
    const time = { ...axis, values: (_, all, __, ___, step) => all.map((at, n) => tick(at, n, all, step)) };
    const when = { label: "time", value: (_, at) => at == null ? "--" : `${utc(at).slice(0, 19)}Z` };
    plots.set(box, new uPlot({
      width: box.clientWidth,
      height: 240,
      tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC"),
      scales: own ? { x: {}, a: {}, b: {} } : { x: {}, a: { range: (_, low, high) => [0, Math.max(1, high)] } },
      axes: own ? [time, { ...axis, scale: "a" }, { ...axis, scale: "b", side: 1, grid: { show: false } }]
        : [time, { ...axis, scale: "a" }],
      series: [when, ...found.series.map((label, number) => ({
        label,
        scale: own && number === 1 ? "b" : "a",
        stroke: COLOURS[number % COLOURS.length],
        width: 2,
        points: { show: false },
        // GPUs are held until the next change; loss and speed are measured now and then.
        ...(own ? {} : { paths: uPlot.paths.stepped({ align: 1 }) }),
        spanGaps: true,
      }))],
    }, found.data, box));
  }

  const boxes = () => document.querySelectorAll("[data-curve]");
  const drawAll = () => boxes().forEach(draw);

  addEventListener("DOMContentLoaded", () => {
    drawAll();
    addEventListener("resize", () => plots.forEach((plot, box) => plot.setSize({ width: box.clientWidth, height: 240 })));
    const button = document.getElementById("follow");
    const now = () => document.getElementById("now");
    if (!button || !now() || !now().hasAttribute("hx-get")) return;
    let follows = localStorage.getItem("follow") !== "no";
    const say = () => { button.textContent = follows ? "Stop refreshing" : "Refresh"; };
    button.hidden = false;
    say();
    button.addEventListener("click", () => {
      follows = !follows;
      localStorage.setItem("follow", follows ? "yes" : "no");
      say();
    });
    setInterval(() => {
      const typing = document.activeElement && document.activeElement.closest("#now form");
      if (!follows || document.hidden || typing) return;
      htmx.trigger(now(), "refresh");
      drawAll();
    }, SECONDS * 1000);
  });
})();
