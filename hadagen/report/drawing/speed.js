// Fills the charts of speed with what is selected. Its arguments are models of Bokeh, but for `regimes` and `names`.
const unique = (values) => [...new Set(values)];
const rows = (source, keep) => [...Array(source.get_length()).keys()].filter(keep);
const is_shown = (data, i) =>
  data.device[i] == device.value && data.kind[i] == kind.value && data.destination[i] == destination.value;

// Offers only what there is beside what was selected before.
function offer(select, options) {
  select.options = options;
  if (!options.includes(select.value)) select.value = options[0];
}
const all = sizes.data;
const of_device = rows(sizes, (i) => all.device[i] == device.value);
offer(kind, unique(of_device.map((i) => all.kind[i])).sort());
const of_kind = of_device.filter((i) => all.kind[i] == kind.value);
offer(destination, unique(of_kind.map((i) => all.destination[i])).sort());
const shown = of_kind.filter((i) => all.destination[i] == destination.value);
const by_n = [...shown].sort((i, j) => all.n[i] - all.n[j]);
offer(size, unique(by_n.map((i) => all.size[i])));

for (const [r, regime] of regimes.entries()) {
  for (const [s, name] of names.entries()) {
    const [i] = rows(
      over_n, (i) => is_shown(over_n.data, i) && over_n.data.regime[i] == regime && over_n.data.series[i] == name);
    panels[r][s].data = i === undefined
      ? { x: [], y: [], sizes: [] }
      : { x: over_n.data.x[i], y: over_n.data.y[i], sizes: over_n.data.sizes[i] };
  }
}

let l2_elements = 0;
for (const [c, cache] of ["hot", "cold"].entries()) {
  for (const [s, name] of names.entries()) {
    const [i] = shown.filter((i) => all.size[i] == size.value && all.series[i] == name && all.cache[i] == cache);
    const found = { x: [], y: [], us: [], regime: [], problem: [], cache: [], fill: [] };
    if (i !== undefined) {
      l2_elements = Math.max(l2_elements, all.l2_elements[i]);
      found.x = all.x[i];
      found.y = all.y[i];
      found.us = all.us[i];
      found.regime = all.regime[i].map((number) => number < 0 ? "decides nothing" : regimes[number]);
      found.problem = found.x.map(() => all.problem[i]);
      found.cache = found.x.map(() => cache);
      found.fill = all.regime[i].map((number) => number < 0 ? "white" : colors[s]);
    }
    lines[c][s].data = found;
  }
}
beyond_l2.visible = memory_label.visible = l2_elements > 0;
if (l2_elements > 0) {
  beyond_l2.left = memory_label.x = l2_elements;
}
const joined = rows(over_n, (i) => is_shown(over_n.data, i)).every((i) => over_n.data.joined[i]);
for (const s of names.keys()) {
  const active = series.active.includes(s);
  for (const renderer of renderers[s]) renderer.visible = active;
  for (const renderer of joints[s]) renderer.visible = active && joined;
}
