/* The curves of one or several runs, over each other or side by side. */

const PANELS = [
  ["Reward", { "reward/mean": "training", "eval/reward/mean": "held out", "blanked/reward/mean": "images blanked" }],
  ["Sampled tokens per episode", { "sampled_tokens/mean": "training", "eval/sampled_tokens/mean": "held out" }],
  ["Entropy (nats)", { entropy: "entropy" }],
  ["Logprob mismatch, trainer and rollout (nats)", { "logprob_mismatch/max": "max", "logprob_mismatch/mean": "mean" }],
  ["Probability ratio", { ratio: "mean", "mismatch/ratio_max": "trainer to rollout, max" }],
  ["Clipped tokens", { clip_fraction: "fraction", dual_clip_fraction: "dual clip, fraction" }],
  ["Gradient norm", { grad_norm: "norm" }],
  ["KL to the reference (nats)", { kl: "kl" }],
  ["Turns per episode", { "turns/mean": "training", "eval/turns/mean": "held out" }],
  [
    "Seconds of computing within rollouts",
    {
      "time/images": "images: decode and resize, all threads",
      "time/vision": "engine: vision encoder",
      "time/prefill": "engine: prefill",
      "time/decode": "engine: decode",
      "time/env": "env: CPU time, all threads",
    },
  ],
  [
    "Seconds of one env.step, waiting included",
    { "turn/env_seconds/mean": "mean", "turn/env_seconds/max": "max" },
  ],
  ["Truncated trajectories", { truncated: "fraction" }],
  ["Failed trajectories", { failed: "count" }],
];
const DASHES = [null, "5 4", "2 3", "9 3 2 3", "12 2"];
const SPARSE = /^(eval|blanked)\//; // measured now and then: with dots, never smoothed

const pointsOf = (r, name) => r.metrics.filter((row) => known(row[name])).map((row) => [row.step, row[name]]);
const hasMetric = (name) => runs.some((r) => r.metrics.some((row) => known(row[name])));

function metricNames() {
  return unique(runs.flatMap((r) => r.metrics.flatMap(Object.keys)))
    .filter((name) => name !== "step" && name !== "time")
    .sort();
}

/* A warm start has steps of its own, often more than the training: they count only for its own metrics, or where there are no others. */
function stepRange(list, names = []) {
  const rows = list.flatMap((r) => r.metrics),
    isSft = (name) => name.startsWith("sft/");
  const others = names.some(isSft) ? [] : rows.filter((row) => !Object.keys(row).some(isSft));
  const steps = (others.length ? others : rows).map((row) => row.step);
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
}

/* The lines of one metric of one run: where it is smoothed, the values themselves are faint behind it. */
function lines(r, name, label, position, alone) {
  const points = pointsOf(r, name);
  if (!points.length) return [];
  const sparse = SPARSE.test(name),
    colour = alone ? `var(--c${position % 8})` : runColour(r);
  const one = {
    name: label,
    label: alone ? label : `${r.name}, ${label}`,
    colour,
    dash: alone ? null : DASHES[position % 5],
    key: alone ? null : "var(--muted)",
    ring: name.startsWith("blanked/"),
    raw: new Map(points),
  };
  if (sparse || !state.smooth || points.length < 3) return [{ ...one, points, dots: sparse }];
  return [
    { ...one, points, faint: true },
    { ...one, points: smoothed(points, state.smooth) },
  ];
}

const level = (name, value, steps) => ({
  name,
  colour: "var(--muted)",
  dash: "2 3",
  points: steps.map((step) => [step, value]),
});

function panel([title, metrics]) {
  const list = shownRuns(),
    span = stepRange(list, Object.keys(metrics)),
    alone = list.length === 1;
  const seriesOf = (r) => {
    const found = Object.entries(metrics).flatMap(([name, label], position) => lines(r, name, label, position, alone)),
      chance = r.config.eval?.chance;
    return alone && title === "Reward" && found.length && known(chance) ? [...found, level("chance", chance, span)] : found;
  };
  const marked = state.step;
  if (!state.apart || alone)
    return [chart({ title, series: list.flatMap(seriesOf), steps: span, pick: openStep, marked })];
  const values = range(list.flatMap(seriesOf).flatMap((s) => s.points.map((p) => p[1])));
  return list.map((r) =>
    chart({ title: `${title}: ${r.name}`, series: seriesOf(r), steps: span, values, pick: openStep, marked }),
  );
}

/* Seconds of a step by part, stacked, of each run. */
function timePanels() {
  const span = stepRange(shownRuns());
  return shownRuns()
    .map((r) => [r, timeParts(r)])
    .filter(([, parts]) => parts.length)
    .map(([r, parts]) =>
      chart({
        title: runs.length > 1 ? `Seconds of a step: ${r.name}` : "Seconds of a step",
        areas: true,
        steps: span,
        pick: openStep,
        marked: state.step,
        series: parts.map(([name, points], position) => ({ name, colour: `var(--c${position % 8})`, points })),
      }),
    );
}

/* Parts of a step that do not overlap: what training took besides the parts that it names is a part, too. */
function timeParts(r) {
  const part = (name) => pointsOf(r, "time/" + name),
    named = ["audit", "update", "transfer"].map((name) => [name, part(name)]);
  const inTraining = new Map();
  for (const [step, seconds] of named.flatMap(([, points]) => points))
    inTraining.set(step, (inTraining.get(step) ?? 0) + seconds);
  const rest = part("train").map(([step, seconds]) => [step, Math.max(0, seconds - (inTraining.get(step) ?? 0))]);
  const parts = [
    ["rollout", part("rollout")],
    ...named,
    [inTraining.size ? "other training" : "train", rest],
    ["checkpoint", part("checkpoint")],
    ["evaluation", part("evaluation")],
  ];
  return parts.filter(([, points]) => points.length);
}

function curvesView() {
  charts.clear();
  if (!runs.some((r) => r.metrics.length))
    return el("p", { class: "empty" }, source.live ? "No step has ended yet." : "This page has no metrics.");
  const panels = [...PANELS, ...state.extra.map((name) => [name, { [name]: name }])].filter(([, metrics]) =>
    Object.keys(metrics).some(hasMetric),
  );
  return el(
    "div",
    { class: "panels" },
    curveControls(),
    el(
      "div",
      { class: "charts" + (state.apart ? " apart" : ""), css: { "--runs": shownRuns().length } },
      panels.map(panel),
      timePanels(),
    ),
  );
}

function curveControls() {
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: state.smooth,
    "aria-label": "smoothing",
    oninput: (event) => {
      state.smooth = +event.target.value;
      redrawCharts();
    },
  });
  const others = metricNames().filter(
    (name) => !PANELS.some(([, metrics]) => name in metrics) && !state.extra.includes(name),
  );
  const options = [["", "add a metric\u2026"], ...others.map((name) => [name, name])];
  const more = select("add a chart", options, "", (name) => {
    state.extra.push(name);
    draw();
  });
  return el(
    "div",
    { class: "controls" },
    el("label", {}, "smoothing ", slider),
    runs.length > 1
      ? toggle("side by side", state.apart, () => {
          state.apart = !state.apart;
          draw();
        })
      : null,
    more,
    el("span", { class: "muted small" }, "click a step to see its trajectories"),
  );
}

/* New charts only: the slider that is being dragged stays. */
function redrawCharts() {
  const old = document.querySelector(".charts");
  if (old) old.replaceWith(curvesView().querySelector(".charts"));
}

function openStep(step) {
  Object.assign(state, { view: "trajectories", allSteps: false, n: null, step });
  if (!steps().includes(step)) state.kind = "";
  draw();
}
