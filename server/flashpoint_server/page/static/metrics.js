// Read Prometheus' text format, and compute figures for the time between two samples.

const LINE = /^(\w+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ASIDE = /route="(other|\/verify|\/caches)"/; // this page's own calls and verifications, which do not count as traffic

// Name → list of {labels, value}.
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match || ASIDE.test(match[2])) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3].replace("Inf", "Infinity")) });
  }
  return found;
}

export function total(sample, name) {
  return (sample.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);
}

// Return the growth of a counter. A restarted server counts from 0.
export function growth(before, now, name) {
  const [old, current] = [total(before, name), total(now, name)];
  return current >= old ? current - old : current;
}

// Return the mean of a histogram's values between two samples; null if there are none.
export function mean(before, now, name) {
  const count = growth(before, now, `${name}_count`);
  return count ? growth(before, now, `${name}_sum`) / count : null;
}

// Return a quantile of these values, interpolated in its bucket as in Prometheus; null if there are none.
export function quantile(q, before, now, name) {
  const [old, current] = [before, now].map((sample) => buckets(sample, `${name}_bucket`));
  const counts = [...current].map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]).sort(([a], [b]) => a - b);
  const all = counts.at(-1)?.[1];
  if (!(all > 0)) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= q * all) return bound === Infinity ? low : low + ((bound - low) * (q * all - below)) / (count - below);
    [low, below] = [bound, count];
  }
  return low;
}

function buckets(sample, name) {
  const sums = new Map();
  for (const { labels, value } of sample.get(name) ?? []) {
    const bound = Number(labels.le.replace("+Inf", "Infinity"));
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return sums;
}
