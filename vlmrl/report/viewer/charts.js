/* Line charts and stacked areas as SVG. Lines scale with the box; labels are HTML, so that they do not. */

const SIDE = 1000; // of the SVG's own square, which is stretched over the chart
const charts = new Set(); // those on the page, for a common cursor

/* Round numbers from lo to hi: ticks(0, 0.93) is [0, 0.5]. */
function ticks(lo, hi, wanted = 4) {
  const rough = (hi - lo) / wanted || 1,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough);
  const first = Math.ceil(lo / step - 1e-9), // beyond 2 ** 53 a number plus 1 is itself
    all = Array.from({ length: wanted + 1 }, (_, i) => (first + i) * step);
  return unique(all.filter((tick) => tick <= hi + step * 1e-9).map((tick) => Number(tick.toPrecision(12))));
}

/* The ticks as texts, with as many digits as make them differ: labels([6.2078, 6.208]) is ["6.2078", "6.208"]. */
function labels(values) {
  for (let digits = 3; ; digits++) {
    const texts = values.map((value) => format(value, digits));
    if (digits === 12 || unique(texts).length === texts.length) return texts;
  }
}

/* The range of all values, with some room; a constant gets a range around it. */
function range(values) {
  let [lo, hi] = [Infinity, -Infinity];
  for (const value of values) [lo, hi] = [Math.min(lo, value), Math.max(hi, value)];
  if (!(hi >= lo)) return [0, 1];
  const most = Math.max(Math.abs(lo), Math.abs(hi));
  const room = hi - lo > most * 1e-6 ? (hi - lo) * 0.06 : most * 0.1 || 0.5; // smoothing leaves a constant with rounding errors
  return [lo >= 0 && lo - room < 0 ? 0 : lo - room, hi + room];
}

/* An exponential mean whose first values count as much as they should (as TensorBoard's). */
function smoothed(points, weight) {
  let last = 0,
    scale = 0;
  return points.map(([x, y]) => {
    last = last * weight + (1 - weight) * y;
    scale = scale * weight + (1 - weight);
    return [x, last / scale];
  });
}

/* series: [{name, colour, dash, dots, faint, points: [[step, value]]}]; `areas` stacks them. Clicking calls pick(step). */
function chart({
  title,
  series,
  areas = false,
  steps: [first, last],
  values = null,
  pick,
  marked = null,
  small = false,
}) {
  const shapes = areas ? stacked(series) : series.filter((s) => s.points.length);
  const [lo, hi] =
    values ??
    range(
      areas
        ? [0, ...shapes.flatMap((s) => s.points.map((p) => p[2]))]
        : shapes.flatMap((s) => s.points.map((p) => p[1])),
    );
  const x = (step) => (last > first ? (step - first) / (last - first) : 0.5);
  const y = (value) => 1 - (value - lo) / (hi - lo);
  const at = ([step, value]) => `${(x(step) * SIDE).toFixed(1)} ${(y(value) * SIDE).toFixed(1)}`;
  const plot = el(
    "div",
    { class: "plot" },
    svg(
      "svg",
      { viewBox: `0 0 ${SIDE} ${SIDE}`, preserveAspectRatio: "none", "aria-hidden": true },
      shapes.map((s) => (areas ? area(s, at) : line(s, at))),
    ),
  );
  const grid = ticks(lo, hi, small ? 2 : 4),
    texts = labels(grid);
  for (const [i, tick] of grid.entries())
    plot.prepend(el("div", { class: "grid", css: { top: y(tick) * 100 + "%" } }, el("span", {}, texts[i])));
  for (const tick of ticks(first, last, 5).filter(Number.isInteger))
    plot.append(el("span", { class: "xtick", css: { left: x(tick) * 100 + "%" } }, String(tick)));
  if (marked !== null) plot.append(el("div", { class: "marked", css: { left: x(marked) * 100 + "%" } }));
  const cursor = plot.appendChild(el("div", { class: "cursor" }));
  const names = unique(shapes.filter((s) => !s.faint).map((s) => s.name));
  const node = el(
    "figure",
    { class: small ? "chart small" : "chart" },
    small ? null : el("figcaption", {}, el("b", {}, title), names.length > 1 || areas ? legend(shapes) : null),
    plot,
  );
  const parts = {
    node,
    move: (step) => {
      cursor.style.display = step === null ? "none" : "block";
      if (step !== null) cursor.style.left = x(step) * 100 + "%";
    },
  };
  charts.add(parts);
  follow(plot, shapes, [first, last], pick);
  return node;
}

function line(s, at) {
  const dots = s.points.length === 1 || s.dots;
  const path = svg("path", {
    d: "M" + s.points.map(at).join("L"),
    class: s.faint ? "line faint" : "line",
    "stroke-dasharray": s.dash ?? null,
    css: { stroke: s.colour },
  });
  if (!dots || s.faint) return [path];
  const marks = { d: s.points.map((p) => `M${at(p)}h0`).join(""), css: { stroke: s.colour } };
  return [
    path,
    svg("path", { ...marks, class: "dots" }),
    s.ring ? svg("path", { ...marks, class: "dots inner" }) : null,
  ];
}

function area(s, at) {
  const top = s.points.map(([step, , above]) => at([step, above])),
    bottom = s.points.map(([step, below]) => at([step, below])).reverse();
  return svg("path", { d: `M${[...top, ...bottom].join("L")}Z`, class: "area", css: { fill: s.colour } });
}

/* Points as [step, from, to, value], each series on top of the earlier ones. */
function stacked(series) {
  const below = new Map();
  const all = unique(series.flatMap((s) => s.points.map(([step]) => step))).sort((a, b) => a - b);
  return series.map((s) => {
    const values = new Map(s.points);
    return {
      ...s,
      points: all.map((step) => {
        const from = below.get(step) ?? 0,
          value = values.get(step) ?? 0;
        below.set(step, from + value);
        return [step, from, from + value, value];
      }),
    };
  });
}

function legend(shapes) {
  const seen = new Map(shapes.filter((s) => !s.faint).map((s) => [s.name, s]));
  return el(
    "span",
    { class: "legend" },
    [...seen.values()].map((s) =>
      el(
        "span",
        {},
        s.dash && !s.dots
          ? svg("svg", {}, line({ points: [0, 26], dash: s.dash, colour: s.key ?? s.colour }, (x) => `${x},2`))
          : el("i", { class: s.ring ? "ring" : s.dots ? "dot" : "", css: { "--colour": s.key ?? s.colour } }),
        s.name,
      ),
    ),
  );
}

/* The cursor, the values under it, and the click that chooses a step. */
function follow(plot, shapes, [first, last], pick) {
  const steps = unique(shapes.flatMap((s) => s.points.map(([step]) => step)));
  const nearest = (event) => {
    const box = plot.getBoundingClientRect(),
      wanted = first + ((last - first) * (event.clientX - box.left)) / box.width;
    return steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]);
  };
  plot.addEventListener("pointermove", (event) => {
    const step = nearest(event);
    if (step === undefined) return;
    for (const other of charts) other.node.isConnected ? other.move(step) : charts.delete(other);
    const values = shapes
      .filter((s) => !s.faint)
      .map((s) => [s, s.points.find(([x]) => x === step)])
      .filter(([, point]) => point);
    const lines = values.map(([s, point]) =>
      el(
        "div",
        {},
        el("i", { class: "swatch", css: { background: s.colour } }),
        ` ${s.label ?? s.name} ${format(point[3] ?? s.raw?.get(step) ?? point[1], 4)}`,
      ),
    );
    showTip([el("b", {}, `step ${step}`), ...lines], {
      left: event.clientX + 14,
      top: event.clientY,
      bottom: event.clientY + 14,
    });
  });
  plot.addEventListener("pointerleave", () => {
    for (const other of charts) other.move(null);
    showTip(null);
  });
  plot.addEventListener("click", (event) => {
    const step = nearest(event);
    if (pick && step !== undefined) pick(step);
  });
}
