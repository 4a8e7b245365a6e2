/* Advisories, failures and settings as tables. */

/* Rows of cells below the names of their columns. `mark` gives the class of a row. */
function table(names, rows, attributes = {}, mark = () => "") {
  const row = (tag, cells, own = {}) =>
    el(
      "tr",
      own,
      cells.map((cell) => el(tag, {}, cell)),
    );
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      attributes,
      row("th", names),
      rows.map((cells) => row("td", cells, { class: mark(cells) })),
    ),
  );
}

function drawAdvisories() {
  const all = shownRuns().flatMap((r) => r.advisories.map((advisory) => ({ ...advisory, run: r })));
  byId("advisories").replaceChildren(
    ...all.map((advisory) =>
      el(
        "div",
        { class: "advisory" },
        el("b", {}, String(advisory.name).replaceAll("_", " ")),
        el(
          "span",
          { class: "muted small" },
          joined([runs.length > 1 ? advisory.run.name : "", `step ${advisory.step}`], ", "),
        ),
        el("span", {}, advisory.message),
        advisory.setting ? el("code", {}, plainText(advisory.setting)) : null,
        button(
          "show",
          () => {
            state.run = advisory.run.index;
            openStep(advisory.step);
          },
          { class: "small" },
        ),
      ),
    ),
  );
}

/* Failed trajectories by reason, the most frequent first. */
function failuresView() {
  const byReason = new Map();
  for (const failure of run().failures) {
    const reason = failure.reason ?? failure.error ?? "no reason";
    byReason.set(reason, [...(byReason.get(reason) ?? []), failure]);
  }
  const sorted = [...byReason.entries()].sort((a, b) => b[1].length - a[1].length);
  if (!sorted.length) return el("div", { class: "page" }, el("p", { class: "empty" }, "No trajectory has failed."));
  return el(
    "div",
    { class: "page" },
    el(
      "p",
      {},
      `${count(run().failures.length, "trajectory", "trajectories")} failed, for ${count(sorted.length, "reason")}.`,
    ),
    sorted.map(([reason, list]) =>
      el(
        "details",
        { class: "reason", open: sorted.length < 4 },
        el("summary", {}, el("b", {}, `${list.length}\u00d7`), " ", el("span", {}, reason)),
        failureTable(list),
      ),
    ),
  );
}

const FAILURES_SHOWN = 100;

function failureTable(list) {
  const cells = (failure) => [
    String(failure.step),
    failure.kind ?? "train",
    failureLink(failure),
    failure.source ?? "",
    count(failure.turns ?? 0, "turn"),
    failure.retried ? "yes" : "no",
    failure.error ?? "",
  ];
  const names = ["step", "kind", "trajectory", "source", "played", "retried", "error"];
  return [
    table(names, list.slice(0, FAILURES_SHOWN).map(cells)),
    list.length > FAILURES_SHOWN
      ? el("p", { class: "muted" }, `The first ${FAILURES_SHOWN} of ${list.length}; all are in trajectories.jsonl.`)
      : null,
  ];
}

function failureLink(failure) {
  const t = run().trajectories.find((each) => each.id === failure.id && each.step === failure.step && failed(each));
  if (!t) return failure.id;
  return button(
    failure.id,
    () => {
      Object.assign(state, {
        view: "trajectories",
        kind: "failed",
        step: t.step,
        n: t.n,
        allSteps: false,
        words: "",
        hits: null,
      });
      draw();
    },
    { class: "link" },
  );
}

/* {"optim": {"lr": 1}} as [["optim.lr", 1]]. */
function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[prefix, value]];
  const entries = Object.entries(value);
  return entries.length
    ? entries.flatMap(([name, inner]) => flat(inner, prefix ? `${prefix}.${name}` : name))
    : [[prefix, value]];
}

let onlyDifferences = true;

/* The settings of several runs, or of one run beside the defaults. */
function configView() {
  const runColumns = runs.map((r) => [r.name, new Map(flat(r.config))]),
    names = unique(runColumns.flatMap(([, settings]) => [...settings.keys()])).filter(Boolean);
  const columns = runs.length > 1 ? runColumns : [...runColumns, ["default", new Map(flat(START.defaults))]];
  const texts = (name) => columns.map(([, settings]) => (settings.has(name) ? plainText(settings.get(name)) : ""));
  const differ = (name) => new Set(texts(name)).size > 1;
  const shown = onlyDifferences ? names.filter(differ) : names;
  const mark = ([name]) => (!onlyDifferences && differ(name) ? "differs" : "");
  return el(
    "div",
    { class: "page" },
    toggle("differences only", onlyDifferences, () => {
      onlyDifferences = !onlyDifferences;
      draw();
    }),
    summaryTable(),
    shown.length
      ? table(
          ["setting", ...columns.map(([title]) => title)],
          shown.map((name) => [name, ...texts(name)]),
          { class: "config" },
          mark,
        )
      : el("p", { class: "empty" }, names.length ? "The settings are equal." : "This page has no settings."),
  );
}

function summaryTable() {
  const names = unique(runs.flatMap((r) => Object.keys(r.summary)));
  if (!names.length) return null;
  return table(
    ["result", ...runs.map((r) => r.name)],
    names.map((name) => [name, ...runs.map((r) => format(r.summary[name], 4))]),
  );
}
