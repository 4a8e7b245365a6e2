/* One trajectory, or the trajectories of a group side by side. */

const rewards = (list) =>
  list
    .filter((t) => !failed(t))
    .map((t) => t.reward)
    .filter(known);

function rewardColour(reward, strength) {
  const all = run().rewardRange ?? [0, 1],
    share = all[1] > all[0] ? (reward - all[0]) / (all[1] - all[0]) : 1;
  const part = Math.round(strength * (25 + 75 * Math.abs(share - 0.5) * 2));
  return `color-mix(in srgb, var(--${share < 0.5 ? "low" : "high"}) ${part}%, transparent)`;
}

function score(t) {
  if (failed(t)) return el("span", { class: "score none" }, "failed");
  if (!known(t.reward)) return el("span", { class: "score none" }, "none");
  return el("span", { class: "score", css: { background: rewardColour(t.reward, 0.42) } }, format(t.reward));
}

const endingTag = (t) =>
  el("span", { class: "tag" + (t.ending === "env_done" ? "" : failed(t) ? " bad" : " cut") }, t.ending ?? "unfinished");
const failure = (t) => (t.error ? el("div", { class: "error" }, t.error) : null);
const fact = (name, value) => el("span", {}, el("span", { class: "muted" }, name + " "), el("b", {}, value));
const answerText = (t) =>
  t.answer === null || t.answer === undefined
    ? null
    : el("p", { class: "answer" }, el("span", { class: "muted" }, "answer "), plainText(t.answer));

function facts(t, members) {
  const others = rewards(members),
    shown = sum(t.turns.map((turn) => turn.images.length));
  return el(
    "div",
    { class: "facts" },
    score(t),
    endingTag(t),
    known(t.final_reward) ? fact("final reward", format(t.final_reward)) : null,
    known(t.group_reward) ? fact("group reward", format(t.group_reward)) : null,
    others.length > 1 ? fact("group mean", format(mean(others))) : null,
    fact("turns", String(t.turns.length)),
    fact("sampled", count(sum(t.turns.map((turn) => turn.sampled_tokens)), "token")),
    shown ? fact("images", String(shown)) : null,
    t.source ? fact("source", t.source) : null,
    Object.entries(t.metrics ?? {}).map(([name, value]) => fact(name, format(value))),
  );
}

function bar(title, shown) {
  const names = unique(shown.flatMap(colourNames)),
    name = shown.length ? colourOf(shown[0]) : "none";
  const colours =
    names.length > 1
      ? select(
          "token colours",
          names.map((each) => [each, COLOURS[each].label]),
          name,
          (value) => {
            state.colour = value;
            drawMain();
          },
          { title: "token colours (c)" },
        )
      : null;
  const ends = shown.length && COLOURS[name].legend(COLOURS[name].full(shown[0]));
  return el(
    "div",
    { class: "bar" },
    el("h2", {}, title),
    colours,
    ends && names.length
      ? el("span", { class: "scale" + (COLOURS[name].one ? " one" : "") }, ends[0], el("i"), ends[1])
      : null,
    toggle("group", state.side, () => toggleSide(), { title: "the group side by side (g)" }),
    button("\u2190", () => move(-1), { "aria-label": "previous trajectory" }),
    button("\u2192", () => move(1), { "aria-label": "next trajectory" }),
  );
}

/* The output of the agent's command, fetched when it is opened. */
function agentLog(t, number) {
  if (!t.has_log) return null;
  const owner = run(),
    box = el("details", { class: "log" }, el("summary", {}, "log of the agent"));
  box.addEventListener(
    "toggle",
    async () => box.append(longText(await source.log(owner, number).catch((error) => error.message))),
    { once: true },
  );
  return box;
}

function single(t, members, number) {
  return el(
    "div",
    { class: "single" },
    bar(t.id, [t]),
    facts(t, members),
    answerText(t),
    failure(t),
    agentLog(t, number),
    tree(t),
    chat(t, true),
  );
}

/* Sets `same` of each turn after the first: all responses on the page to the same state, "2.3" for the second member's third. */
function linkStates(records) {
  const of = new Map();
  let place = 0;
  records.forEach((t, member) =>
    t.turns.forEach((turn, i) => {
      const found = { turn, place: place++, name: records.length > 1 ? `${member + 1}.${i + 1}` : String(i + 1) };
      turn.same = [];
      if (i && turn.state) of.set(turn.state, [...(of.get(turn.state) ?? []), found]);
    }),
  );
  for (const all of of.values()) for (const { turn } of all) turn.same = all;
}

/* The members' records in columns; their prompt once, if they share it. */
function sideBySide(group, records) {
  const prompts = records.filter((t) => t.turns.length).map((t) => JSON.stringify(t.turns[0].messages ?? t.prompt));
  const shared = prompts.length > 0 && prompts.every((prompt) => prompt === prompts[0]);
  const first = records.find((t) => t.turns.length);
  return el(
    "div",
    {},
    bar(group.members[0].group_id, records),
    shared ? el("div", { class: "prompt" }, messages(first, first.turns[0], 0)) : null,
    answerText(records[0]),
    el(
      "div",
      { class: "columns" },
      records.map((t, i) =>
        el(
          "div",
          { class: "column" },
          el(
            "div",
            { class: "head", css: known(t.reward) && !failed(t) ? { "border-color": rewardColour(t.reward, 1) } : {} },
            score(t),
            endingTag(t),
            el("span", { class: "muted" }, count(t.turns.length, "turn")),
            button("open", () => {
              state.side = false;
              go(group.members[i]);
            }),
          ),
          failure(t),
          chat(t, !shared),
        ),
      ),
    ),
  );
}

let drawing = 0;

/* Fetches what is selected, and shows it unless something else was selected meanwhile. */
async function drawMain() {
  const main = byId("main"),
    mine = ++drawing,
    t = selected(),
    owner = run();
  if (!main) return;
  const group = t && groups().find((g) => g.members.includes(t));
  if (!group) return main.replaceChildren(el("p", { class: "empty" }, noneText()));
  try {
    const wanted = state.side ? group.members : [t];
    const records = await Promise.all(wanted.map((member) => record(owner, member.n)));
    if (mine !== drawing) return;
    linkStates(records);
    main.replaceChildren(state.side ? sideBySide(group, records) : single(records[0], group.members, t.n));
    main.scrollTop = 0;
  } catch (error) {
    if (mine === drawing)
      main.replaceChildren(el("p", { class: "error" }, `This trajectory could not be read: ${error.message}`));
  }
}

function noneText() {
  if (!run().trajectories.length)
    return source.live ? "No trajectory has been written yet." : "There are no trajectories.";
  return inScope().length
    ? "No trajectory matches the filters."
    : `Step ${currentStep()} has no ${KINDS[state.kind] ?? ""} trajectories.`;
}

function toggleSide() {
  state.side = !state.side;
  saveAddress();
  drawMain();
}
