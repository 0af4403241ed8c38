"use strict";
(() => {
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
  const hidden = new Set();

  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = JSON.parse(svg.dataset.chart), cross = svg.querySelector(".cross");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      const value = (at - chart.left) / (chart.right - chart.left) * chart.end;
      const outside = value < 0 || value > chart.end * 1.001;
      svg.classList.toggle("pointed", !outside);
      if (outside) { tip.hidden = true; return; }
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
    });
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      svg.classList.remove("pointed");
    });
  }
  document.addEventListener("pointermove", (event) => {
    const text = event.target.dataset && event.target.dataset.tip;
    if (text) {
      tip.textContent = text;
      place(event);
    } else if (!event.target.closest || !event.target.closest("svg[data-chart]")) {
      tip.hidden = true;
    }
  });
  for (const button of document.querySelectorAll("button[data-toggle]")) {
    button.addEventListener("click", () => {
      const name = button.dataset.toggle, hide = !hidden.has(name);
      if (hide) hidden.add(name); else hidden.delete(name);
      for (const element of document.querySelectorAll("[data-name]")) {
        if (element.dataset.name === name) element.classList.toggle("hidden", hide);
      }
      for (const other of document.querySelectorAll("button[data-toggle]")) {
        if (other.dataset.toggle === name) other.setAttribute("aria-pressed", String(!hide));
      }
    });
  }
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
