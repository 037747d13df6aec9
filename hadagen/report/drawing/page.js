// Fills the page with what is chosen. Without it, the page has all its tables, but no charts and no list of winners.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const unique = (values) => [...new Set(values)];
document.body.classList.add("scripted");

// ---- the speed of an n, and the charts of speed
const rows = [...document.querySelectorAll("#speeds tbody tr")];
const choices = ["device", "kind", "destination"];

// The rows of what is chosen. Each choice offers what there is beside the choices before it.
function chosen_rows() {
  return choices.reduce((left, name) => {
    const values = unique(left.map((row) => row.dataset[name])).sort();
    const chosen = values.includes(at(name).value) ? at(name).value : values[0];
    at(name).replaceChildren(...values.map((value) => new Option(value, value, false, value === chosen)));
    return left.filter((row) => row.dataset[name] === chosen);
  }, rows);
}

function show_speed() {
  const chosen = chosen_rows();
  const asked = Number(at("n").value) || 1;
  const distance = (n) => Math.abs(Math.log(n / asked));
  const n = unique(chosen.map((row) => Number(row.dataset.n))).reduce((a, b) => distance(b) < distance(a) ? b : a);
  for (const row of rows) row.hidden = !(chosen.includes(row) && Number(row.dataset.n) === n);
  at("nearest").textContent =
    n === asked ? `The speed of n = ${n}:` : `n = ${asked} is not in this file. The speed of the nearest n, ${n}:`;
  for (const each of document.querySelectorAll(".n")) each.textContent = n;
  const document_ = window.Bokeh?.documents[0];
  if (!document_) return;
  const chart = (name) => document_.get_model_by_name(name);
  const shown = [...document.querySelectorAll("#series input:checked")].map((box) => box.value);
  const fill = (name, series, points, joined = true) => {
    for (const each of chart(name).renderers.filter((each) => each.name === series)) {
      each.data_source.data = points;
      each.visible = shown.includes(series) && (joined || each.glyph.type !== "Line");
    }
  };

  data.regimes.forEach((regime, column) => {
    for (const series of data.series) {
      const of = chosen.filter((row) => row.dataset.series === series && row.querySelectorAll("b")[column].dataset.times);
      const cells = of.map((row) => row.querySelectorAll("b")[column]);
      const joined = of.every((row) => !("matrix" in row.dataset)); // their orders differ, not only their n
      fill(regime, series, {
        x: of.map((row) => Number(row.dataset.n)),
        y: cells.map((cell) => Number(cell.textContent)),
        times: cells.map((cell) => cell.dataset.times),
        fill: of.map(() => 1),
      }, joined);
    }
    fit([chart(regime)]);
  });

  const is_chosen = (line) => line.n === n && choices.every((name) => line[name] === at(name).value);
  for (const cache of data.caches) {
    const of = data.lines.filter((line) => line.cache === cache && is_chosen(line));
    for (const series of data.series) {
      const line = of.find((line) => line.series === series) ?? { x: [], y: [], us: [], regime: [] };
      fill(cache, series, {
        x: line.x,
        y: line.y,
        us: line.us,
        problem: line.x.map(() => line.problem),
        regime: line.regime.map((number) => data.regimes[number] ?? "not chosen by this time"),
        fill: line.regime.map((number) => number < 0 ? 0 : 1),
      });
    }
    const l2_elements = Math.max(0, ...of.map((line) => line.l2_elements));
    chart(`${cache} band`).setv({ visible: l2_elements > 0, left: l2_elements });
  }
  fit(data.caches.map(chart));
  const of_errors = chart("errors")?.renderers ?? [];
  for (const each of of_errors) each.visible = !data.series.includes(each.name) || shown.includes(each.name);
}

// The axis of the speed begins at 0.8, or lower where something is slower.
function fit(charts) {
  const shown = charts.flatMap((chart) => chart.renderers.filter((each) => each.visible));
  const speeds = shown.flatMap((each) => [...each.data_source.data.y]);
  const start = Math.min(0.8, Math.floor(Math.min(...speeds, 1) * 10) / 10);
  const end = Math.max(1.1, Math.ceil(Math.max(...speeds, 1) * 10 + 0.2) / 10);
  for (const chart of charts) chart.y_range.setv({ start, end });
}

if (rows.length) {
  for (const id of ["n", "choice", "series"]) at(id).addEventListener("input", show_speed);
  at("choice").addEventListener("submit", (event) => event.preventDefault());
  show_speed();
  const when_drawn = () => window.Bokeh?.documents.length ? show_speed() : requestAnimationFrame(when_drawn);
  when_drawn();
}

// ---- the list of winners
const MOST = 100;
let order = 0; // a column and 1, or minus that for descending; 0 for the order of the file
const value = (row, column) => data.winners.texts[column]?.[row[column]] ?? row[column];

function show_winners() {
  const words = at("words").value.toLowerCase().split(/\s+/).filter((word) => word);
  let found = data.winners.rows.filter((row) => {
    const line = words.length && row.map((_, column) => value(row, column)).join(" ").toLowerCase();
    return words.every((word) => line.includes(word));
  });
  if (order) {
    const key = (row) => value(row, Math.abs(order) - 1) ?? -1;
    found = [...found].sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * Math.sign(order));
  }
  at("found").textContent = `${Math.min(MOST, found.length)} of ${found.length} winners`;
  at("winners").tBodies[0].replaceChildren(...found.slice(0, MOST).map((row) => {
    const line = document.createElement("tr");
    row.forEach((_, column) => {
      const shown = value(row, column) ?? "–";
      const cell = line.insertCell();
      cell.textContent = typeof shown === "number" ? shown.toLocaleString("en", { maximumSignificantDigits: 9 }) : shown;
      cell.className = typeof row[column] === "number" && !data.winners.texts[column] ? "number" : "";
    });
    return line;
  }));
}

if (at("winners")) {
  at("words").addEventListener("input", show_winners);
  [...at("winners").tHead.rows[0].cells].forEach((head, column) => head.firstChild.addEventListener("click", () => {
    order = order === column + 1 ? -order : column + 1;
    show_winners();
  }));
  show_winners();
}
