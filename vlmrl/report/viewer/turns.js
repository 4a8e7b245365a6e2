/* One turn: messages, images, and the response's tokens with their numbers. */

/* How tokens are coloured: what is read of a turn, its legend, and the value at which the colour is full. */
const COLOURS = {
  logprob: {
    label: "logprob",
    value: (turn, i) => turn.logprobs?.[i],
    has: (turn) => turn.logprobs,
    one: true,
    full: () => 4,
    legend: () => ["0", "\u22124 or less"],
  },
  mismatch: {
    label: "mismatch",
    value: mismatch,
    has: (turn) => turn.logprobs && turn.trainer_logprobs,
    full: (t) => Math.max(0.05, largest(t, mismatch)),
    legend: (full) => [`\u2212${format(full)}`, `+${format(full)}`],
  },
  teacher: {
    label: "teacher \u2212 student",
    value: lead,
    has: (turn) => turn.teacher_logprobs && turn.trainer_logprobs,
    full: (t) => Math.max(0.05, largest(t, lead)),
    legend: (full) => [`\u2212${format(full)}`, `+${format(full)}`],
  },
  advantage: {
    label: "advantage",
    value: (turn, i) => turn.advantages?.[i],
    has: (turn) => turn.advantages,
    full: (t) => largest(t, COLOURS.advantage.value) || 1,
    legend: (full) => [`\u2212${format(full)}`, `+${format(full)}`],
  },
  mask: {
    label: "loss mask",
    value: (turn, i) => turn.loss_mask?.[i],
    has: (turn) => turn.loss_mask,
    full: () => 1,
    legend: () => ["not trained", "trained"],
  },
  none: { label: "no colours", value: () => null, has: () => true, full: () => 1, legend: () => null },
};

function mismatch(turn, i) {
  const [trainer, rollout] = [turn.trainer_logprobs?.[i], turn.logprobs?.[i]];
  return known(trainer) && known(rollout) ? trainer - rollout : null;
}

/* The teacher's logprob minus the trainer's. */
function lead(turn, i) {
  const [teacher, trainer] = [turn.teacher_logprobs?.[i], turn.trainer_logprobs?.[i]];
  return known(teacher) && known(trainer) ? teacher - trainer : null;
}

function largest(t, value) {
  let most = 0;
  for (const turn of t.turns)
    for (let i = 0; i < (turn.tokens?.length ?? 0); i++) most = Math.max(most, Math.abs(value(turn, i) ?? 0));
  return most;
}

/* The ways to colour that this trajectory has numbers for; none without tokens. */
const colourNames = (t) =>
  Object.keys(COLOURS).filter((name) => t.turns.some((turn) => turn.tokens && COLOURS[name].has(turn)));
const colourOf = (t) => (colourNames(t).includes(state.colour) ? state.colour : (colourNames(t)[0] ?? "none"));

function token(turn, i, name, full) {
  const text = turn.tokens[i],
    value = COLOURS[name].value(turn, i);
  const kind = /^<\|[^|]*\|>$/.test(text) ? " special" : text.includes("\n") ? " newline" : "";
  const share = known(value) ? Math.min(1, Math.abs(value) / full) : 0;
  const sign = name === "logprob" || value < 0 ? " low" : " high";
  const off = name === "mask" && !value ? " off" : "";
  const span = el("span", { class: "token" + kind + (share ? sign : "") + off }, text);
  if (share) span.style.setProperty("--share", share.toFixed(3));
  span.tipText = () => tokenTip(turn, i);
  return span;
}

function tokenTip(turn, i) {
  const rollout = turn.logprobs?.[i],
    trainer = turn.trainer_logprobs?.[i];
  const lines = [
    JSON.stringify(turn.tokens[i]),
    known(rollout)
      ? `rollout logprob ${format(rollout)}   p ${format(Math.exp(rollout))}`
      : rollout
        ? `rollout logprob ${rollout}`
        : "no rollout logprob",
  ];
  if (known(trainer)) lines.push(`trainer logprob ${format(trainer)}`);
  if (known(mismatch(turn, i))) lines.push(`mismatch ${format(mismatch(turn, i), 5)}`);
  if (known(lead(turn, i))) lines.push(`teacher logprob ${format(turn.teacher_logprobs[i])}`);
  if (known(turn.advantages?.[i])) lines.push(`advantage ${format(turn.advantages[i])}`);
  if (turn.loss_mask) lines.push(turn.loss_mask[i] ? "trained" : "not trained");
  return lines.join("\n");
}

/* Long texts are cut until the reader wants all of them. */
function longText(text) {
  const box = el("div", { class: "text" }, text);
  if (text.length < 2200 && text.split("\n").length < 30) return box;
  box.classList.add("long");
  const more = button(
    `show all ${count(text.length, "character")}`,
    () => {
      box.classList.remove("long");
      more.remove();
    },
    { class: "more" },
  );
  return el("div", {}, box, more);
}

const SMALL_IMAGE = 140; // pixels: smaller images are shown larger than they are

/* Where a response acted on an image: a dot for a click, an arrow for a drag. */
function points(sets) {
  return sets.map(({ label, at }) => {
    const [x, y] = at.at(-1).map((fraction) => 100 * fraction + "%"),
      [fromX, fromY] = at[0].map((fraction) => 100 * fraction + "%");
    return el(
      "span",
      { class: "points" },
      at.length > 1 ? svg("svg", {}, svg("line", { x1: fromX, y1: fromY, x2: x, y2: y })) : null,
      el("i", { class: "point", title: label, css: { left: x, top: y } }),
    );
  });
}

function image(id, acted = []) {
  const missing = (why) => el("figure", { class: "missing" }, why);
  if (id === null) return missing("This image is not among the turn's images.");
  const shown = el("img", { alt: `image ${id.slice(0, 8)}` }),
    caption = el("figcaption", {}, id.slice(0, 8));
  const figure = el("figure", { class: "image" }, el("span", { class: "canvas" }, shown, points(acted)), caption),
    owner = run();
  shown.addEventListener("load", () => {
    caption.textContent = `${shown.naturalWidth}\u00d7${shown.naturalHeight} \u00b7 ${id.slice(0, 8)}`;
    if (shown.naturalWidth < SMALL_IMAGE) shown.style.width = `${Math.min(SMALL_IMAGE, 4 * shown.naturalWidth)}px`;
  });
  shown.addEventListener("click", () => zoom(shown, caption.textContent, acted));
  return whenNear(figure, async () => {
    const address = await imageAddress(owner, id).catch(() => null);
    if (address) shown.src = address;
    else figure.replaceWith(missing("This image was not kept: of each step, those of the first trajectories are."));
  });
}

function zoom(shown, caption, acted) {
  const scale = Math.max(
    1,
    Math.min(8, (0.94 * innerWidth) / shown.naturalWidth, (0.86 * innerHeight) / shown.naturalHeight),
  );
  byId("zoom").replaceChildren(
    el(
      "span",
      { class: "canvas" },
      el("img", { src: shown.src, alt: "", css: { width: Math.floor(shown.naturalWidth * scale) + "px" } }),
      points(acted),
    ),
    el("p", {}, caption),
  );
  byId("zoom").showModal();
}

function message(m, acted = []) {
  const last = m.parts.findLastIndex((part) => "image" in part);
  const parts = m.parts.map((part, i) =>
    "image" in part ? image(part.image, i === last ? acted : []) : part.text ? longText(part.text) : null,
  );
  return el(
    "section",
    { class: "message" },
    el("div", { class: "who" }, el("strong", {}, m.role)),
    parts.some(Boolean) ? parts : el("div", { class: "empty" }, "empty message"),
  );
}

const hasImage = (m) => m.parts.some((part) => "image" in part);
const showsImage = (turn) => turn.messages?.some(hasImage);

/* What responses did on the last image before the turn `index`: its own, and those of later turns that showed no image. */
function pointsOn(t, index) {
  const acted = [];
  for (let i = index; i < t.turns.length && (i === index || !showsImage(t.turns[i])); i++)
    acted.push(...(t.turns[i].points ?? []));
  return acted;
}

/* What was shown before a response. Records without messages have the text and the images apart. */
function messages(t, turn, index) {
  const acted = pointsOn(t, index);
  if (turn.messages) {
    const last = turn.messages.findLastIndex(hasImage);
    return turn.messages.map((m, i) => message(m, i === last ? acted : []));
  }
  const text = index ? turn.observation : t.prompt;
  return [
    message({ role: index ? "observation" : "prompt", parts: [...turn.images.map((id) => ({ image: id })), { text }] }),
  ];
}

function response(t, turn, index) {
  const versions = turn.policy_versions ?? [];
  const facts = [
    turn.asked ? "asked for by the history policy" : "",
    count(turn.sampled_tokens, "token"),
    known(turn.mean_logprob) ? "mean logprob " + format(turn.mean_logprob) : "",
    turn.stop_reason === "stop" ? "" : "stop reason " + turn.stop_reason,
    versions.length ? "policy version " + unique([versions[0], versions.at(-1)]).join("\u2013") : "",
    known(turn.logprob_mismatch) ? "mismatch " + format(turn.logprob_mismatch) : "",
    ...Object.entries(turn.metrics ?? {}).map(([name, value]) => `${name} ${format(value)}`),
  ].filter(Boolean);
  return el(
    "section",
    { class: "response" },
    el(
      "div",
      { class: "who" },
      el("strong", {}, t.turns.length > 1 ? `response ${index + 1} of ${t.turns.length}` : "response"),
      facts.map((fact) => el("span", {}, fact)),
      sameState(turn),
      known(turn.reward) ? el("span", { class: "end" }, "reward ", el("b", {}, format(turn.reward))) : null,
    ),
    responseBody(t, turn),
  );
}

const LINKS = 6;

/* Links to the other responses to the state that this turn began in. */
function sameState(turn) {
  const others = turn.same.filter((other) => other.turn !== turn);
  if (!others.length) return null;
  const links = others.slice(0, LINKS).map(({ name, place }) => button(name, () => bringToView(place)));
  const rest = others.length > LINKS ? `and ${others.length - LINKS} more` : null;
  return el("span", { class: "same" }, "same state as", links, rest);
}

function responseBody(t, turn) {
  if (!turn.tokens?.length) return turn.text ? longText(turn.text) : el("div", { class: "empty" }, "empty response");
  const name = colourOf(t),
    full = COLOURS[name].full(t),
    body = el("div", { class: "text tokens" });
  body.style.minHeight = Math.ceil(turn.text.length / 90) * 1.55 + "em"; // about its height, until it is filled
  return whenNear(body, () => {
    body.style.minHeight = "";
    body.append(...turn.tokens.map((_, i) => token(turn, i, name, full)));
  });
}

const chat = (t, withPrompt) =>
  t.turns.flatMap((turn, i) => [branch(t, i), ...(i || withPrompt ? messages(t, turn, i) : []), response(t, turn, i)]);
