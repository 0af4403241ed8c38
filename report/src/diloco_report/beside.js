"use strict";
// Draws the validation loss of other runs beside that of this one: of reports that a reader chooses from files.
(() => {
  const MAX_BYTES = 1 << 26, MAX_POINTS = 400, MAX_RUNS = 8;
  const PLACES = { tokens: 1, time: 0 };  // by chart: where a point has its place on the axis
  const runs = [];  // names
  let said = "";
  const input = document.createElement("input");
  Object.assign(input, { type: "file", accept: ".json,application/json", hidden: true });
  input.setAttribute("aria-label", "report.json of another run");
  const isPoint = (point) => Array.isArray(point) && point.length > 2 && point.slice(0, 3).every(Number.isFinite);
  const read = async (file) => {
    if (file.size > MAX_BYTES) return `${file.name}: is larger than ${MAX_BYTES >> 20} MiB, which no report is`;
    if (runs.length >= MAX_RUNS) return `${MAX_RUNS} runs are beside this one already; diloco compare takes 24`;
    let report;
    try {
      report = JSON.parse(await file.text());
    } catch (error) {
      return `${file.name}: is no JSON; choose the report.json of a run's directory`;
    }
    const found = report && report.series && report.series.global, points = Array.isArray(found) ? found.filter(isPoint) : [];
    if (!points.length) return `${file.name}: has no validation loss; choose the report.json of a run's directory`;
    const named = String(report.run || file.name).slice(0, 60), taken = new Set(runs.concat(charts.linesOf(charts.dataOf(plots()[0])).map((line) => line.name)));
    let name = named;
    for (let n = 2; taken.has(name); n++) name = `${named} (${n})`;
    const step = Math.ceil(points.length / MAX_POINTS), thin = points.filter((_, i) => i % step === 0 || i === points.length - 1);
    for (const [chart, place] of Object.entries(PLACES)) {
      const css = `var(--s${(runs.length * 3 + 5) % 8})`;
      charts.add(chart, { name, css, dash: "6 4", strong: true, x: thin.map((point) => point[place]), y: thin.map((point) => point[2]) });
    }
    runs.push(name);
    return "";
  };
  const plots = () => [...document.querySelectorAll("svg[data-chart]")].filter((svg) => charts.dataOf(svg).name in PLACES);
  const show = (within) => {
    const svg = plots().find((each) => within.contains(each)), section = svg && svg.closest("section");
    if (!section) return;
    const legend = section.querySelector(".legend");
    for (const old of legend.querySelectorAll("[data-beside]")) old.remove();
    for (const name of runs) {
      const line = charts.linesOf(charts.dataOf(svg)).find((each) => each.name === name);
      const toggle = charts.button("", name, "Hide or show this run"), swatch = document.createElement("i");
      swatch.style.background = line.css;
      toggle.prepend(swatch);
      toggle.dataset.toggle = name;
      toggle.dataset.beside = "";
      legend.append(toggle);
    }
    const choose = charts.button("beside", "Beside another run …", "Draw the report.json of another run into these charts; diloco compare shows settings and end values too");
    choose.dataset.beside = "";
    const note = document.createElement("span");
    note.dataset.beside = "";
    note.setAttribute("role", "status");
    note.textContent = said;
    legend.append(choose, note);
  };
  document.body.append(input);
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-tool=beside]")) input.click();
  });
  input.addEventListener("change", async () => {
    const file = input.files[0];
    said = file ? await read(file) : "";
    input.value = "";
    page.show(document);
  });
  document.addEventListener("shown", (event) => show(event.detail));
  page.show(document);
})();
