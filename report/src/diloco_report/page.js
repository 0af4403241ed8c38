"use strict";
// Answers a pointer over the pictures, and the buttons. Listeners are the document's, so that parts may be replaced.
const page = (() => {
  const tip = document.getElementById("tip");
  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth;
    tip.style.left = Math.max(4, right ? event.clientX - box.width - 14 : event.clientX + 16) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + "px";
  };
  const duration = (seconds) => {
    const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
  };
  const count = (n) => {
    for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (n >= scale) return (n / scale).toPrecision(3) + unit;
    }
    return String(Math.round(n));
  };
  const size = (n) => {
    for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (n >= scale) return `${(n / scale).toPrecision(3)} ${unit}`;
    }
    return `${Math.round(n)} B`;
  };
  const forms = { time: duration, tokens: (n) => count(n) + " tokens", bytes: size };
  const hidden = new Set(), charts = new WeakMap();
  const chartOf = (svg) => {
    if (!charts.has(svg)) charts.set(svg, JSON.parse(svg.dataset.chart));
    return charts.get(svg);
  };
  const unpoint = () => {
    tip.hidden = true;
    for (const svg of document.querySelectorAll("svg.pointed")) svg.classList.remove("pointed");
  };
  const point = (svg, event) => {
    const chart = chartOf(svg), cross = svg.querySelector(".cross"), box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const value = (at - chart.left) / (chart.right - chart.left) * chart.end;
    unpoint();
    if (value < 0 || value > chart.end * 1.001) return;
    svg.classList.add("pointed");
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    tip.replaceChildren(forms[chart.axis](value));
    for (const line of chart.lines) {
      if (hidden.has(line.name)) continue;
      let near = 0;
      line.x.forEach((x, i) => { if (Math.abs(x - value) < Math.abs(line.x[near] - value)) near = i; });
      const dot = document.createElement("i");
      dot.style.background = line.css;
      tip.append("\n", dot, `${line.name}  ${line.y[near].toFixed(3)}`);
    }
    place(event);
  };
  document.addEventListener("pointermove", (event) => {
    const target = event.target.closest ? event.target : null, svg = target && target.closest("svg[data-chart]");
    if (svg) {
      point(svg, event);
      return;
    }
    unpoint();
    if (target && target.dataset.tip) {
      tip.textContent = target.dataset.tip;
      place(event);
    }
  });
  // Show within an element what the buttons say: all, but for the names that are hidden.
  const show = (within) => {
    for (const element of within.querySelectorAll("[data-name]")) {
      element.classList.toggle("hidden", hidden.has(element.dataset.name));
    }
    for (const button of within.querySelectorAll("button[data-toggle]")) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.toggle)));
    }
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && button.dataset.toggle !== undefined) {
      const name = button.dataset.toggle;
      if (!hidden.delete(name)) hidden.add(name);
      show(document);
    } else if (button && button.id === "theme") {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
    }
  });
  return { show };
})();
