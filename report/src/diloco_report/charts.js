"use strict";
// Draws charts again from their data: at the width that there is, smoothed, within a stretch of their axis, with a logarithmic
// axis; and gives them out as CSV. Without it charts are the pictures that the server drew.
const charts = (() => {
  const DRAG = 6;  // pixels, from which on a press is a drag
  const NARROW = 420;  // pixels of a chart, below which names of references have no room
  const views = new Map();  // by a chart's name: its stretch (`to` is Infinity up to the newest), and whether its axis is logarithmic
  const added = new Map();  // by a chart's name: lines of other runs
  const drawn = new WeakMap();  // by picture: its data, and how it was drawn last
  let smoothing = 0;  // weight of what was before, from 0 to 1

  const scaled = (n, units, small) => {
    for (const [unit, scale] of units) if (Math.abs(n) >= scale) return (n / scale).toPrecision(3) + unit;
    return small(n);
  };
  const value = (n) => String(Number(n.toPrecision(4)));
  const count = (n) => scaled(n, [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]], value);
  const size = (n) => scaled(n, [[" TB", 1e12], [" GB", 1e9], [" MB", 1e6], [" kB", 1e3]], (b) => `${Math.round(b)} B`);
  const duration = (seconds) => {
    const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
  };
  const AXES = { time: duration, tokens: count, bytes: size };
  const VALUES = { number: value, count, bytes: size };
  const TIMES = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

  const multiples = (low, high, step) => {
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  };
  const niceTicks = (low, high, wanted) => {
    if (!(high > low)) return [low];
    const power = 10 ** Math.floor(Math.log10((high - low) / wanted));
    return multiples(low, high, power * [1, 2, 5, 10].find((factor) => (high - low) / (power * factor) <= wanted));
  };
  const timeTicks = (low, high, wanted) =>
    multiples(low, high, TIMES.find((step) => (high - low) / step <= wanted) || 86400 * Math.ceil((high - low) / wanted / 86400));
  const logTicks = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of [1, 2, 5]) {
        const tick = Number((factor * 10 ** power).toPrecision(3));
        if (tick >= low && tick <= high) found.push(tick);
      }
    }
    return found.length > 2 ? found : niceTicks(low, high, 6).filter((tick) => tick > 0);
  };

  const dataOf = (svg) => {
    if (!drawn.has(svg)) drawn.set(svg, { chart: JSON.parse(svg.dataset.chart), wide: 0 });
    return drawn.get(svg).chart;
  };
  const viewOf = (chart) => {
    if (!views.has(chart.name)) views.set(chart.name, { from: 0, to: Infinity, log: false });
    return views.get(chart.name);
  };
  const linesOf = (chart) => [...chart.lines, ...(added.get(chart.name) || [])];
  const isWhole = (view) => view.from === 0 && view.to === Infinity;

  // Exponential means that begin at the first value; they begin again behind a gap.
  const smoothed = (line) => {
    if (!smoothing) return line.y;
    const begins = new Set(line.breaks || []);
    let mean = 0, weight = 0;
    return line.y.map((y, i) => {
      if (begins.has(i)) mean = weight = 0;
      mean = smoothing * mean + (1 - smoothing) * y;
      weight = smoothing * weight + 1 - smoothing;
      return mean / weight;
    });
  };
  const rangeOf = (chart, view, end, curves) => {
    if (isWhole(view) && !view.log && !added.has(chart.name)) return [chart.low, chart.high];
    let low = Infinity, high = -Infinity;
    for (const { line, y } of curves) {
      if (page.hidden.has(line.name)) continue;
      line.x.forEach((x, i) => {
        if (x < view.from || x > end || (view.log && y[i] <= 0)) return;
        low = Math.min(low, y[i]);
        high = Math.max(high, y[i]);
      });
    }
    if (low > high) return view.log ? [Math.max(chart.low, 1e-9), Math.max(chart.high, 1e-8)] : [chart.low, chart.high];
    if (view.log) return [low / 1.03, high * 1.03];
    if (chart.low === 0) return [0, 1.06 * high || 1];
    const margin = Math.max(0.04 * (high - low), 0.002 * Math.abs(high));
    return [Math.max(0, low - margin), high + margin || 1];
  };

  const make = (kind, attributes, text) => {
    const element = document.createElementNS(document.querySelector("svg").namespaceURI, kind);
    for (const [name, its] of Object.entries(attributes)) element.setAttribute(name, its);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const draw = (svg) => {
    const chart = dataOf(svg), view = viewOf(chart), wide = Math.round(svg.parentNode.clientWidth);
    if (!wide) return;  // it is not shown
    const lines = linesOf(chart), newest = Math.max(chart.end, ...lines.map((line) => line.x[line.x.length - 1] || 0));
    const end = Math.min(view.to, newest), from = view.from < end ? view.from : 0;
    const curves = lines.map((line) => ({ line, y: smoothed(line) }));
    const [low, high] = rangeOf(chart, view, end, curves);
    const named = Object.entries(chart.references).filter(([, its]) => its >= low && its <= high).sort((a, b) => b[1] - a[1]);
    const moments = chart.moments.filter(([at]) => at >= from && at <= end);
    const narrow = wide < NARROW, tall = narrow ? 270 : 320;
    const area = {
      left: 48,
      right: wide - 12 - (named.length ? (narrow ? 30 : 86) : 0),
      top: 14 + (moments.length ? 14 : 0),
      bottom: tall - 40,
    };
    const x = (its) => area.left + (area.right - area.left) * (its - from) / (end - from || 1);
    const level = view.log ? Math.log : (its) => its;
    const y = (its) => area.bottom - (area.bottom - area.top) * (level(its) - level(low)) / (level(high) - level(low) || 1);
    Object.assign(drawn.get(svg), { wide, area, from, end, curves });
    svg.setAttribute("viewBox", `0 0 ${wide} ${tall}`);
    const clip = make("clipPath", { id: `clip-${chart.name}` });
    clip.append(make("rect", { x: area.left, y: area.top, width: area.right - area.left, height: area.bottom - area.top }));
    const parts = [clip], inside = { "clip-path": `url(#clip-${chart.name})` };
    const text = (kind, at, below, anchor, said) =>
      parts.push(make("text", { class: kind, x: at, y: below, "text-anchor": anchor }, said));
    const across = (kind, at) => parts.push(make("line", { class: kind, x1: area.left, x2: area.right, y1: at, y2: at }));
    for (const tick of view.log ? logTicks(low, high) : niceTicks(low, high, narrow ? 5 : 6)) {
      across("grid", y(tick));
      text("tick", area.left - 6, y(tick) + 4, "end", VALUES[chart.form](tick));
    }
    for (const tick of (chart.axis === "time" ? timeTicks : niceTicks)(from, end, narrow ? 4 : 6)) {
      text("tick", x(tick), area.bottom + 18, x(tick) > wide - 20 ? "end" : "middle", AXES[chart.axis](tick));
    }
    text("axis", (area.left + area.right) / 2, tall - 4, "middle", chart.label + (view.log ? `, ${chart.quantity} logarithmic` : ""));
    let above = area.top - 9;
    for (const [name, its] of named) {
      across("reference", y(its));
      above = Math.max(y(its) + 4, above + 13);
      text("reference", area.right + 5, above, "start", narrow ? its.toFixed(2) : `${name} ${its.toFixed(2)}`);
    }
    for (const [at, said] of moments) {
      parts.push(make("line", { class: "reference", x1: x(at), x2: x(at), y1: area.top, y2: area.bottom }));
      text("reference", x(at), area.top - 4, at > (from + end) / 2 ? "end" : "start", said);
    }
    const curve = (line, values, kind) => {
      const begins = new Set([0, ...(line.breaks || [])]);
      let path = "", pen = true;
      line.x.forEach((its, i) => {
        if (view.log && values[i] <= 0) {
          pen = true;
          return;
        }
        path += `${pen || begins.has(i) ? "M" : "L"}${x(its).toFixed(1)} ${y(values[i]).toFixed(1)}`;
        pen = false;
      });
      const element = make("path", { class: `line${kind}`, d: path, "data-name": line.name, ...inside });
      element.style.stroke = line.css;
      element.style.strokeDasharray = line.dash || "";
      parts.push(element);
    };
    for (const { line, y: values } of [...curves].reverse()) {
      if (smoothing) curve(line, line.y, " raw");
      curve(line, values, line.strong ? " strong" : "");
      const shown = line.x.map((its, i) => i).filter((i) => line.x[i] >= from && line.x[i] <= end && !(view.log && values[i] <= 0));
      if (line.x.length > 1 && !(line.strong && shown.length <= 40)) continue;
      for (const i of shown) {
        const dot = make("circle", { class: "dot", cx: x(line.x[i]), cy: y(values[i]), r: 3.5, "data-name": line.name, ...inside });
        dot.style.fill = line.css;
        parts.push(dot);
      }
    }
    parts.push(make("line", { class: "cross", y1: area.top, y2: area.bottom, x1: area.left, x2: area.left }));
    parts.push(make("rect", { class: "selection", x: 0, y: area.top, width: 0, height: area.bottom - area.top }));
    for (const part of parts) if (page.hidden.has(part.dataset.name)) part.classList.add("hidden");
    svg.replaceChildren(...parts);
    tools(svg.parentNode, chart, view);
  };

  // --- the buttons of a chart, and those of a section

  const button = (name, said, title) => {
    const element = document.createElement("button");
    Object.assign(element, { type: "button", textContent: said, title });
    element.dataset.tool = name;
    return element;
  };
  const tools = (plot, chart, view) => {
    let row = plot.querySelector(".tools");
    if (!row) {
      row = document.createElement("div");
      row.className = "tools";
      row.append(
        button("whole", "Whole", "Show the whole axis again (or double-click the chart)"),
        button("half", "Newest half", "Show the newer half of what is shown; drag over a stretch of the chart to show that"),
        button("log", "Log", "Logarithmic axis"),
        button("csv", "CSV", "Save the points of this chart as a file of comma-separated values"),
      );
      plot.prepend(row);
    }
    row.querySelector("[data-tool=whole]").disabled = isWhole(view);
    row.querySelector("[data-tool=log]").setAttribute("aria-pressed", String(view.log));
  };
  const smoother = (section) => {
    let input = section.querySelector(".smoothing input");
    if (!input) {
      const label = document.createElement("label");
      label.className = "smoothing";
      label.title = "Exponential means of the points; 0: the points themselves";
      input = document.createElement("input");
      Object.assign(input, { type: "range", min: 0, max: 0.98, step: 0.02 });
      label.append("Smoothing", input);
      section.querySelector(".legend").append(label);
    }
    input.value = smoothing;
  };
  const everywhere = () => {
    for (const svg of document.querySelectorAll("svg[data-chart]")) draw(svg);
    for (const input of document.querySelectorAll(".smoothing input")) input.value = smoothing;
  };
  // Names as a spreadsheet takes them: as text, and none as a formula.
  const cell = (name) => `"${(/^[=+\-@\t\r]/.test(name) ? "'" : "") + name.replaceAll('"', '""')}"`;
  const csv = (chart) => {
    const rows = [`line,${chart.axis === "time" ? "wall_s" : chart.axis},${chart.quantity}`];
    for (const line of linesOf(chart)) line.x.forEach((x, i) => rows.push(`${cell(line.name)},${x},${line.y[i]}`));
    return rows.join("\n") + "\n";
  };
  const save = (name, text, type) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = `${document.querySelector("h1").textContent}-${name}`.replace(/[^\w.-]+/g, "-").slice(-120);
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };

  // --- the pointer

  const valueAt = (svg, clientX) => {
    const { area, from, end } = drawn.get(svg), box = svg.getBoundingClientRect();
    const at = (clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    return { at, value: from + (at - area.left) / (area.right - area.left) * (end - from) };
  };
  const point = (svg, event) => {
    const { chart, area, curves, from, end } = drawn.get(svg), cross = svg.querySelector(".cross");
    const { at, value: its } = valueAt(svg, event.clientX);
    if (at < area.left || at > area.right + 1) return;
    svg.classList.add("pointed");
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    page.tip.replaceChildren(AXES[chart.axis](its) + (chart.axis === "tokens" ? " tokens" : ""));
    for (const { line, y } of curves) {
      if (page.hidden.has(line.name) || !line.x.length) continue;
      let near = -1;
      line.x.forEach((x, i) => {
        if (x >= from && x <= end && (near < 0 || Math.abs(x - its) < Math.abs(line.x[near] - its))) near = i;
      });
      if (near < 0) continue;
      const dot = document.createElement("i");
      dot.style.background = line.css;
      page.tip.append("\n", dot, `${line.name}  ${chart.quantity === "loss" ? y[near].toFixed(3) : VALUES[chart.form](y[near])}`);
    }
    page.place(event);
  };
  let drag = null;
  const drawnAt = (event) => {
    const svg = event.target.closest ? event.target.closest("svg[data-chart]") : null;
    return svg && drawn.has(svg) && drawn.get(svg).area ? svg : null;
  };
  document.addEventListener("pointerdown", (event) => {
    const svg = drawnAt(event);
    if (svg && event.button === 0) drag = { svg, from: event.clientX };
  });
  document.addEventListener("pointermove", (event) => {
    for (const svg of document.querySelectorAll("svg.pointed")) svg.classList.remove("pointed");
    if (drag && drag.svg.isConnected) {
      const { area } = drawn.get(drag.svg), inside = (at) => Math.min(area.right, Math.max(area.left, at));
      const ends = [drag.from, event.clientX].map((at) => inside(valueAt(drag.svg, at).at)).sort((a, b) => a - b);
      const selection = drag.svg.querySelector(".selection");
      selection.setAttribute("x", ends[0]);
      selection.setAttribute("width", ends[1] - ends[0]);
      return;
    }
    const svg = drawnAt(event);
    if (svg) point(svg, event);
  });
  const zoom = (svg, from, to) => {
    const chart = dataOf(svg), view = viewOf(chart);
    if (to > from) Object.assign(view, { from: Math.max(0, from), to });
    draw(svg);
  };
  document.addEventListener("pointerup", (event) => {
    const ended = drag;
    drag = null;
    if (!ended || !ended.svg.isConnected) return;
    if (Math.abs(event.clientX - ended.from) < DRAG) return draw(ended.svg);
    const ends = [ended.from, event.clientX].map((at) => valueAt(ended.svg, at).value).sort((a, b) => a - b);
    zoom(ended.svg, ends[0], ends[1] >= drawn.get(ended.svg).end ? viewOf(dataOf(ended.svg)).to : ends[1]);
  });
  document.addEventListener("pointercancel", () => {
    if (drag && drag.svg.isConnected) draw(drag.svg);
    drag = null;
  });
  document.addEventListener("dblclick", (event) => {
    const svg = drawnAt(event);
    if (svg) zoom(svg, 0, Infinity);
  });
  document.addEventListener("click", (event) => {
    const tool = event.target.closest("button[data-tool]"), plot = tool && tool.closest(".plot");
    if (!plot) return;
    const svg = plot.querySelector("svg[data-chart]"), chart = dataOf(svg), view = viewOf(chart), { from, end } = drawn.get(svg);
    if (tool.dataset.tool === "csv") save(`${chart.name}.csv`, csv(chart), "text/csv");
    else if (tool.dataset.tool === "whole") zoom(svg, 0, Infinity);
    else if (tool.dataset.tool === "half") zoom(svg, (from + end) / 2, view.to);
    else {
      view.log = !view.log;
      draw(svg);
    }
  });
  document.addEventListener("input", (event) => {
    if (!event.target.closest(".smoothing")) return;
    smoothing = Number(event.target.value);
    everywhere();
  });
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const svg = target.querySelector("svg[data-chart]");
      if (svg && drawn.get(svg).wide !== Math.round(target.clientWidth)) draw(svg);
    }
  });
  document.addEventListener("shown", (event) => {
    for (const svg of event.detail.querySelectorAll("svg[data-chart]")) {
      draw(svg);
      sizes.observe(svg.parentNode);
      const section = svg.closest("section");
      if (section && section.querySelector(".legend")) smoother(section);
    }
  });
  const add = (name, line) => added.set(name, [...(added.get(name) || []), line]);
  return { add, button, everywhere, linesOf, dataOf, save };
})();
