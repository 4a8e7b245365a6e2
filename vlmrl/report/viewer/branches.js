/* An episode whose turns are a tree: its paths over their tokens, and what each leaves out. */

const contextLength = (turn) => turn.kept_tokens + turn.prompt_tokens + turn.sampled_tokens;

/* Whether the turn keeps all of its parent's context; a response of the history `inline` loses its end-of-turn token. */
function goesOn(t, i) {
  const above = t.turns[t.turns[i].parent];
  return Boolean(above) && t.turns[i].kept_tokens >= contextLength(above) - 1;
}

/* Chains of turns that go on. A path has one `level` more than the path with the last token that it keeps. */
function paths(t) {
  const found = [],
    of = [];
  t.turns.forEach((turn, i) => {
    of[i] = goesOn(t, i) && of[turn.parent].turns.at(-1) === turn.parent ? of[turn.parent] : null;
    if (of[i]) return of[i].turns.push(i);
    let parent = turn.parent;
    while (known(parent) && turn.kept_tokens <= t.turns[parent].kept_tokens) parent = t.turns[parent].parent;
    found.push((of[i] = { turns: [i], level: known(parent) ? of[parent].level + 1 : 0 }));
  });
  return found;
}

function contextImages(t, i) {
  const turn = t.turns[i];
  return [...(known(turn.parent) ? contextImages(t, turn.parent).slice(0, turn.kept_images) : []), ...turn.images];
}

/* For the turn `i` and each turn above it: how many tokens of that turn's context it has. */
function pathTokens(t, i) {
  const found = new Map();
  for (let tokens = contextLength(t.turns[i]); known(i); i = t.turns[i].parent) {
    found.set(i, tokens);
    tokens = Math.min(tokens, t.turns[i].kept_tokens);
  }
  return found;
}

/* "leaves out 340 tokens and 2 images of the context of response 3": what the model saw in the turn before and no longer sees. */
function leftOut(t, i) {
  if (!i) return "";
  const before = pathTokens(t, i - 1),
    common = [...pathTokens(t, i)].find(([turn]) => before.has(turn)),
    tokens = contextLength(t.turns[i - 1]) - (common ? Math.min(common[1], before.get(common[0])) : 0),
    shown = contextImages(t, i),
    images = unique(contextImages(t, i - 1)).filter((id) => !shown.includes(id)).length;
  const what = count(tokens, "token") + (images ? " and " + count(images, "image") : "");
  return `leaves out ${what} of the context of response ${i}`;
}

/* A line for each path: its responses, and a bar from the first token that it does not share to its last one. */
function tree(t) {
  if (t.turns[0]?.kept_tokens === undefined) return null; // no branches
  const most = Math.max(...t.turns.map(contextLength));
  const lines = paths(t).map(({ turns, level }) => {
    const first = t.turns[turns[0]],
      length = contextLength(t.turns[turns.at(-1)]),
      names = unique([turns[0] + 1, turns.at(-1) + 1]).join("\u2013");
    const percent = (tokens) => (100 * tokens) / most + "%";
    const sampled = sum(turns.map((i) => t.turns[i].sampled_tokens));
    return el(
      "div",
      { class: "path" },
      button(`${turns.length > 1 ? "responses" : "response"} ${names}`, () => bringToView(turns[0]), {
        css: { "margin-left": level + "em" },
      }),
      el(
        "span",
        { class: "track" },
        el("i", { css: { left: percent(first.kept_tokens), width: percent(length - first.kept_tokens) } }),
      ),
      el(
        "span",
        { class: "muted" },
        joined([`${count(length, "token")}, ${sampled.toLocaleString("en")} sampled`, leftOut(t, turns[0])], "; "),
      ),
    );
  });
  return el("div", { class: "tree" }, lines);
}

function bringToView(index) {
  document.querySelectorAll("#main section.response")[index]?.scrollIntoView({ block: "center" });
}

/* Above a response that does not go on from the response before it. */
function branch(t, i) {
  const turn = t.turns[i];
  if (!i || turn.kept_tokens === undefined || (goesOn(t, i) && turn.parent === i - 1)) return null;
  return el("div", { class: "branch" }, "branch: " + leftOut(t, i));
}
