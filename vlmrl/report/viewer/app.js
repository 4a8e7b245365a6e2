/* Views, keyboard, and following runs that go on. */

const VIEWS = {
  curves: { label: "Curves", view: curvesView, has: () => runs.some((r) => r.metrics.length) || source.live },
  trajectories: { label: "Trajectories", view: trajectoriesView, has: () => true },
  failures: { label: "Failures", view: failuresView, has: () => runs.some((r) => r.failures.length) },
  config: { label: "Config", view: configView, has: () => runs.some((r) => Object.keys(r.config).length) },
};
const HELP = [
  ["j", "\u2192", "next trajectory"],
  ["k", "\u2190", "previous trajectory"],
  ["J", "K", "next and previous group"],
  ["[", "]", "previous and next step"],
  ["g", "", "group side by side"],
  ["c", "", "next token colours"],
  ["/", "", "search"],
  ["1", "4", "curves, trajectories, failures, config"],
  ["?", "", "this help"],
];
const KEYS = {
  j: () => move(1),
  ArrowRight: () => move(1),
  k: () => move(-1),
  ArrowLeft: () => move(-1),
  J: () => moveGroup(1),
  K: () => moveGroup(-1),
  "[": () => moveStep(-1),
  "]": () => moveStep(1),
  g: toggleSide,
  c: nextColour,
  "/": () => byId("search")?.focus(),
};
const POLL_MS = 1500;

function show(view) {
  state.view = view;
  draw();
}

/* Everything again. The trajectory that is shown is the selected one, or the first that passes the filters. */
function draw() {
  prepare();
  if (!VIEWS[state.view]?.has()) state.view = runs.some((r) => r.metrics.length) ? "curves" : "trajectories";
  drawHeader();
  drawAdvisories();
  byId("view").replaceChildren(VIEWS[state.view].view());
  byId("view").className = state.view;
  if (state.view === "trajectories") search();
  saveAddress();
}

function prepare() {
  for (const r of runs) {
    const all = rewards(r.trajectories);
    r.rewardRange = all.length ? [Math.min(...all.slice(-20000)), Math.max(...all.slice(-20000))] : null;
  }
}

function drawHeader() {
  byId("title").textContent = runs.length === 1 ? run().name || START.title : START.title;
  byId("runs").replaceChildren(...(runs.length > 1 ? runs.map(runChip) : []));
  byId("progress").textContent = runs.length === 1 ? progressOf(run()) : "";
  byId("tabs").replaceChildren(
    ...Object.entries(VIEWS)
      .filter(([, { has }]) => has())
      .map(([name, { label }]) =>
        toggle(
          name === "failures" ? `${label} ${sum(runs.map((r) => r.failures.length))}` : label,
          state.view === name,
          () => show(name),
          { title: `${label} (${Object.keys(VIEWS).indexOf(name) + 1})` },
        ),
      ),
  );
}

/* How far a run is: its last step of how many, and the held-out rewards of its first evaluation and its last. */
function progressOf(r) {
  const step = pointsOf(r, "trajectories").at(-1)?.[0],
    rewards = pointsOf(r, "eval/reward/mean").map(([, reward]) => format(reward)),
    ends = rewards.length > 1 ? [rewards[0], rewards.at(-1)] : rewards;
  const last = step && `step ${step} of ${r.config.train?.steps ?? "?"}`;
  return joined([last, ends.length && `held-out reward ${ends.join(" \u2192 ")}`]);
}

/* With curves, a chip shows or hides its run; elsewhere it chooses it. */
function runChip(r) {
  const curves = state.view === "curves",
    on = curves ? !state.hiddenRuns.has(r.index) : state.run === r.index;
  const press = () => {
    if (!curves) Object.assign(state, { run: r.index, step: null, n: null, hits: null });
    else if (on) state.hiddenRuns.add(r.index);
    else state.hiddenRuns.delete(r.index);
    draw();
  };
  return el(
    "button",
    { type: "button", "aria-pressed": String(on), onclick: press },
    el("i", { class: "swatch", css: { background: runColour(r) } }),
    " ",
    r.name,
  );
}

function nextColour() {
  const t = selected();
  if (t)
    record(run(), t.n).then((full) => {
      const names = colourNames(full);
      state.colour = names[(names.indexOf(colourOf(full)) + 1) % names.length];
      drawMain();
    });
}

function showHelp() {
  byId("help").replaceChildren(
    el("h2", {}, "Keyboard"),
    el(
      "table",
      {},
      HELP.map(([key, other, what]) =>
        el("tr", {}, el("td", {}, el("kbd", {}, key), other ? [" ", el("kbd", {}, other)] : null), el("td", {}, what)),
      ),
    ),
  );
  byId("help").showModal();
}

addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea")) return event.key === "Escape" && event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || byId("zoom").open || byId("help").open) return;
  const view = Object.keys(VIEWS)[event.key - 1]; // its number stays the same where another view has nothing to show
  if (event.key === "?") showHelp();
  else if (VIEWS[view]?.has()) show(view);
  else if (KEYS[event.key] && state.view === "trajectories") KEYS[event.key]();
  else return;
  event.preventDefault();
});
for (const name of ["zoom", "help"]) byId(name).addEventListener("click", () => byId(name).close());
byId("theme").addEventListener("click", nextTheme);
byId("help-button").addEventListener("click", showHelp);
addEventListener("hashchange", () => {
  readAddress();
  draw();
});

/* What a run wrote meanwhile: new charts and rows. What is being read stays as it is. */
function drawNews() {
  prepare();
  drawHeader();
  drawAdvisories();
  if (state.view === "curves") return byId("view").querySelector(".charts") ? redrawCharts() : draw();
  if (state.view !== "trajectories") return draw();
  if (!byId("filters").contains(document.activeElement)) byId("filters").replaceWith(filters());
  byId("strip").replaceWith(stepStrip());
  if (inScope().includes(selected())) drawList();
  else search();
}

async function poll() {
  try {
    const changed = await Promise.all(runs.map(source.updates));
    const rows = runs.flatMap((r) => r.metrics.slice(-1)),
      seconds = rows.length ? Date.now() / 1000 - Math.max(...rows.map((row) => row.time ?? 0)) : null;
    byId("live").textContent =
      seconds === null ? "waiting for the first step" : seconds < 120 ? "following" : `last step ${age(seconds)} ago`;
    byId("live").className = "live on";
    if (changed.some(Boolean)) drawNews();
  } catch (error) {
    byId("live").textContent = error.message.startsWith("401")
      ? "the token is missing: open the address that the command printed"
      : "the server does not answer";
    byId("live").className = "live off";
  }
  setTimeout(poll, POLL_MS);
}

const age = (seconds) =>
  seconds < 7200
    ? `${Math.round(seconds / 60)} min`
    : seconds < 172800
      ? `${Math.round(seconds / 3600)} h`
      : `${Math.round(seconds / 86400)} days`;

async function start() {
  setTheme(storedTheme());
  readAddress();
  await Promise.all(runs.map(source.updates)).catch(() => {});
  if (runs.some((r) => r.trajectories.some((t) => t.kind === "train")) && (!selected() || selected().kind === "train"))
    state.kind = "train";
  draw();
  if (source.live) poll();
}
start();
