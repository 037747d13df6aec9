// Shows the effects of knobs on the trials and in the regime that are selected.
const data = effects.data;
const rows = [...Array(effects.get_length()).keys()].filter(
  (i) => data.problems[i] == problems.value && data.regime[i] == regime.value);
const shown = {};
for (const name of Object.keys(data)) shown[name] = rows.map((i) => data[name][i]);
chart.y_range.factors = [...shown.factor].reverse();
chart.height = frame + line * Math.max(1, rows.length);
boxes.data = shown;
