/* The filters and the list of trajectories. Only rows near the visible part of the list are in the page. */

const ROW = { group: 58, member: 31 }; // heights in pixels
const OPEN_GROUPS = 80; // with more groups than this, only the selected one is open
const closed = new Map(); // groups that the reader opened or closed
let rows = [];

function trajectoriesView() {
  return el(
    "div",
    { class: "browser" },
    el(
      "aside",
      {},
      filters(),
      el("div", { id: "list", class: "list", tabindex: 0, onscroll: drawRows }, el("div", { id: "rows" })),
    ),
    el("section", { id: "detail" }, stepStrip(), el("div", { id: "main", class: "main" })),
  );
}

/* Rewards over the steps: the step that is shown is marked, a click chooses another one. */
function stepStrip() {
  const step = currentStep(),
    all = steps(),
    r = run();
  if (step === null) return el("div", { id: "strip" }); // episodes of `vlmrl play` belong to no step
  const colour = "var(--c0)",
    points = pointsOf(r, "reward/mean");
  const series = [
    { name: "reward", colour, faint: true, points },
    { name: "reward", colour, points: smoothed(points, state.smooth), raw: new Map(points) },
    { name: "held out", colour: "var(--c1)", dots: true, points: pointsOf(r, "eval/reward/mean") },
  ];
  const at = all.indexOf(step);
  return el(
    "div",
    { id: "strip", class: "strip" },
    el(
      "div",
      { class: "stepper" },
      button("\u2039", () => moveStep(-1), {
        "aria-label": "previous step",
        title: "previous step ([)",
        disabled: at <= 0,
      }),
      el("b", {}, `step ${step}`),
      button("\u203a", () => moveStep(1), {
        "aria-label": "next step",
        title: "next step (])",
        disabled: at < 0 || at >= all.length - 1,
      }),
      source.live && state.step !== null ? button("latest", () => setStep(null)) : null,
    ),
    points.length > 1
      ? chart({ title: "reward", series, steps: stepRange([r]), pick: openStep, marked: step, small: true })
      : null,
  );
}

function filters() {
  const number = (name, label) =>
    el("input", {
      type: "number",
      step: "any",
      placeholder: label,
      value: state[name],
      "aria-label": `reward ${label}`,
      oninput: (event) => {
        state[name] = event.target.value === "" ? null : +event.target.value;
        filtered();
      },
    });
  const all = run().trajectories,
    sources = unique(all.map((t) => t.source)).sort();
  const kinds = Object.keys(KINDS).filter((kind) => all.some((t) => (kind === "failed" ? failed(t) : t.kind === kind)));
  const endings = unique(all.map((t) => String(t.ending))).sort();
  const choice = (name, label, options) =>
    options.length > 1 || state[name]
      ? select(label, [["", label], ...options], state[name], (value) => {
          state[name] = value;
          rescope();
        })
      : null;
  return el(
    "div",
    { id: "filters", class: "filters" },
    el("input", {
      type: "search",
      id: "search",
      placeholder: "search (/)",
      value: state.words,
      "aria-label": "search the texts",
      oninput: (event) => {
        state.words = event.target.value;
        search();
      },
    }),
    choice(
      "kind",
      "all kinds",
      kinds.map((kind) => [kind, KINDS[kind]]),
    ),
    choice(
      "source",
      "all sources",
      sources.map((name) => [name, name]),
    ),
    el("span", { class: "pair" }, number("from", "from"), number("to", "to")),
    steps().length > 1
      ? toggle("all steps", state.allSteps, () => {
          state.allSteps = !state.allSteps;
          rescope();
        })
      : null,
    endings.length > 1
      ? el(
          "div",
          { class: "chips" },
          endings.map((ending) =>
            toggle(ending, state.endings.has(ending), () => {
              state.endings.has(ending) ? state.endings.delete(ending) : state.endings.add(ending);
              filtered();
            }),
          ),
        )
      : null,
    el("div", { id: "counts", class: "muted small" }),
  );
}

/* The filters changed: the selection moves to what is left. */
function filtered() {
  const list = groups().flatMap((g) => g.members),
    t = selected();
  if (list.length && !list.includes(t)) state.n = list[0].n;
  for (const chip of document.querySelectorAll("#filters .chips button"))
    chip.setAttribute("aria-pressed", String(state.endings.has(chip.textContent)));
  drawList();
  drawMain();
  saveAddress();
}

/* Another step, kind or source: what was found belongs to the old ones. */
function rescope() {
  if (!state.allSteps && state.step !== null && !steps().includes(state.step))
    state.step = steps().findLast((step) => step <= state.step) ?? steps()[0] ?? null;
  byId("strip")?.replaceWith(stepStrip());
  byId("filters")?.replaceWith(filters());
  search();
}

let searching = new AbortController();

/* Each letter begins a search, and ends the one before it. */
async function search() {
  searching.abort();
  const mine = (searching = new AbortController()),
    words = state.words.trim();
  if (!words) {
    state.hits = null;
    return filtered();
  }
  const step = state.allSteps ? null : currentStep();
  const found = await source.search(run(), words, inScope(), step, mine.signal).catch((error) => {
    if (!mine.signal.aborted) throw error;
  });
  if (mine.signal.aborted) return;
  state.hits = new Set(found);
  filtered();
}

function isOpen(group, total) {
  return closed.has(group.key) ? !closed.get(group.key) : total <= OPEN_GROUPS || group.members.includes(selected());
}

function drawList() {
  const list = byId("list");
  if (!list) return;
  const found = groups(),
    shown = found.flatMap((g) => g.members),
    average = mean(rewards(shown));
  rows = [];
  let top = 0;
  for (const group of found) {
    rows.push({ group, top, height: ROW.group });
    top += ROW.group;
    for (const t of isOpen(group, found.length) ? group.members : []) {
      rows.push({ group, t, top, height: ROW.member });
      top += ROW.member;
    }
  }
  byId("rows").style.height = top + "px";
  byId("counts").textContent = joined([
    shown.length === inScope().length
      ? count(shown.length, "trajectory", "trajectories")
      : `${shown.length} of ${inScope().length} trajectories`,
    count(found.length, "group"),
    average === null ? "" : "mean reward " + format(average),
  ]);
  const here = rows.find((row) => row.t && row.t.n === state.n);
  if (here && (here.top < list.scrollTop || here.top + here.height > list.scrollTop + list.clientHeight))
    list.scrollTop = here.top - list.clientHeight / 3;
  drawRows();
}

function drawRows() {
  const list = byId("list"),
    from = list.scrollTop - 300,
    to = list.scrollTop + list.clientHeight + 300;
  byId("rows").replaceChildren(
    ...rows
      .filter((row) => row.top + row.height > from && row.top < to)
      .map((row) => {
        const node = row.t ? memberRow(row.t) : groupRow(row.group);
        node.style.top = row.top + "px";
        return node;
      }),
  );
}

function memberRow(t) {
  return el(
    "button",
    { type: "button", class: "row member", "aria-current": t.n === state.n, onclick: () => go(t) },
    score(t),
    el("span", {}, endingTag(t)),
    el("span", { class: "small muted" }, count(t.turns, "turn")),
  );
}

function groupRow(group) {
  const first = group.members[0],
    image = group.members.find((t) => t.image)?.image,
    average = mean(rewards(group.members));
  const kind = group.kind === "train" ? "" : (KINDS[group.kind] ?? group.kind);
  const place = joined([state.allSteps ? `step ${group.step}` : "", kind], ", ");
  return el(
    "button",
    {
      type: "button",
      class: "row group" + (image ? "" : " text-only"),
      title: first.group_id,
      "aria-expanded": String(isOpen(group, rows.length)),
      onclick: () => {
        closed.set(group.key, isOpen(group, groups().length));
        drawList();
      },
    },
    image ? thumbnail(image) : null,
    el("span", { class: "question" }, first.question || first.group_id),
    el(
      "span",
      { class: "boxes" },
      group.members.map(box),
      el("span", { class: "small muted" }, joined([place, average === null ? "" : "mean " + format(average)])),
    ),
  );
}

function box(t) {
  const none = failed(t) || !known(t.reward);
  return el("span", {
    class: "box" + (none ? " none" : ""),
    css: none ? {} : { background: rewardColour(t.reward, 1) },
  });
}

function thumbnail(id) {
  const node = el("img", { alt: "" });
  imageAddress(run(), id).then(
    (address) => (address ? (node.src = address) : node.classList.add("absent")),
    () => {},
  );
  return node;
}

function go(t) {
  state.n = t.n;
  if (source.live && state.step === null) state.step = t.step; // new steps do not take away what is being read
  const group = groups().find((g) => g.members.includes(t));
  if (group && closed.get(group.key)) closed.set(group.key, false);
  saveAddress();
  drawList();
  drawMain();
}

/* The next trajectory, or the next group while groups are side by side. */
function move(by) {
  if (state.side) return moveGroup(by);
  const list = groups().flatMap((g) => g.members),
    next = list[list.indexOf(selected()) + by];
  if (next) go(next);
}

function moveGroup(by) {
  const list = groups(),
    next = list[list.findIndex((g) => g.members.includes(selected())) + by];
  if (next) go(next.members[0]);
}

function moveStep(by) {
  const next = steps()[steps().indexOf(currentStep()) + by];
  if (next !== undefined) setStep(next);
}

function setStep(step) {
  Object.assign(state, { step, allSteps: false, n: null });
  rescope();
}
