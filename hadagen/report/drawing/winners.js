// Shows the winners that have every word of the filter. Texts stand in the page once each, and as their numbers here.
const text = (name, i) => texts[names.indexOf(name)][codes.data[name][i]];
const words = filter.value.toLowerCase().split(/\s+/).filter((word) => word);
const kept = [...Array(codes.get_length()).keys()].filter((i) => {
  if (!words.length) return true;
  const line = names.map((name) => text(name, i)).join(" ").toLowerCase();
  return words.every((word) => line.includes(word));
});
const found = {};
for (const name of Object.keys(codes.data)) {
  found[name] = kept.map((i) => names.includes(name) ? text(name, i) : codes.data[name][i]);
}
shown.data = found;
