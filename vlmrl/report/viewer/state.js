/* What is shown: the view, the run, the step, the trajectory and the filters. The address keeps the first ones. */

const FAILED = new Set(["error", "aborted"]);
const KINDS = { train: "training", eval: "held out", blanked: "images blanked", collect: "collected", failed: "failed" };
const state = {
  view: null,
  run: 0,
  step: null,
  n: null,
  side: false,
  colour: "logprob",
  smooth: 0.6,
  apart: false,
  extra: [],
  hiddenRuns: new Set(),
  allSteps: false,
  kind: "",
  source: "",
  from: null,
  to: null,
  endings: new Set(),
  words: "",
  hits: null,
};
let runs = START.runs.map((_, index) => newRun(index));

const run = () => runs[state.run];
const shownRuns = () => runs.filter((r) => !state.hiddenRuns.has(r.index));
const failed = (t) => FAILED.has(t.ending);
const runColour = (r) => `var(--c${r.index % 8})`;

/* The steps that have trajectories of the chosen kind, in order; without one of any kind. */
function steps() {
  return unique(
    run()
      .trajectories.filter(ofKind)
      .map((t) => t.step),
  ).sort((a, b) => a - b);
}

/* The step whose trajectories are shown: the chosen one, or the latest. */
function currentStep() {
  return state.step ?? steps().at(-1) ?? null;
}

function ofKind(t) {
  if (state.kind === "failed") return failed(t);
  return !state.kind || t.kind === state.kind;
}

function passes(t) {
  if (state.source && t.source !== state.source) return false;
  if (state.endings.size && !state.endings.has(String(t.ending))) return false;
  if (state.from !== null && !(known(t.reward) && t.reward >= state.from)) return false;
  if (state.to !== null && !(known(t.reward) && t.reward <= state.to)) return false;
  return !state.hits || state.hits.has(t.n);
}

/* The trajectories of the chosen kind, of the step that is shown or of all steps. */
function inScope() {
  const step = currentStep();
  return run().trajectories.filter((t) => ofKind(t) && (state.allSteps || t.step === step));
}

/* The trajectories that pass the filters, by group: the newest step first, groups in the order in which they were written. */
function groups() {
  const found = new Map();
  for (const t of inScope().filter(passes)) {
    const key = `${t.step}/${t.kind}/${t.group_id}`;
    if (!found.has(key)) found.set(key, { key, step: t.step, kind: t.kind, members: [] });
    found.get(key).members.push(t);
  }
  const list = [...found.values()];
  return state.allSteps ? list.sort((a, b) => b.step - a.step) : list;
}

const selected = () => run().trajectories[state.n] ?? null;

function saveAddress() {
  const words = new URLSearchParams();
  if (TOKEN) words.set("token", TOKEN);
  words.set("view", state.view);
  if (state.run) words.set("run", state.run);
  if (state.step !== null) words.set("step", state.step);
  if (state.n !== null) words.set("n", state.n);
  if (state.side) words.set("group", 1);
  history.replaceState(null, "", "#" + words);
}

function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (words.has(name) && Number.isFinite(+words.get(name)) ? +words.get(name) : null);
  state.view = VIEWS[words.get("view")] ? words.get("view") : null;
  state.run = runs[number("run")] ? number("run") : 0;
  [state.step, state.n, state.side] = [number("step"), number("n"), words.has("group")];
}
