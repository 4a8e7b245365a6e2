/* Where the page's data comes from: elements of this file, or the server of `vlmrl view --serve`. */

const START = JSON.parse(byId("data").textContent);
const LISTS = ["metrics", "trajectories", "failures", "advisories"];

function newRun(index) {
  return {
    index,
    name: "",
    generation: "",
    config: {},
    summary: {},
    records: new Map(),
    ...Object.fromEntries(LISTS.map((name) => [name, []])),
  };
}

/* Adds what a response has to a run. Returns whether anything is new. */
function addUpdates(run, response) {
  const isNew = response.generation !== run.generation;
  if (isNew) {
    run.records.clear();
    for (const name of LISTS) run[name] = [];
  }
  for (const name of LISTS) run[name].push(...(response[name] ?? []));
  const ended = JSON.stringify(run.summary) !== JSON.stringify(response.summary ?? {});
  for (const name of ["generation", "name", "config", "summary", "folder"]) run[name] = response[name] ?? run[name];
  return isNew || ended || LISTS.some((name) => response[name]?.length);
}

const embeddedSource = {
  live: false,
  async updates(run) {
    return addUpdates(run, { generation: "file", ...START.runs[run.index] });
  },
  async record(run, number) {
    return JSON.parse(byId(`trajectory-${run.index}-${number}`).textContent);
  },
  async image(run, id) {
    return byId(`image-${id}`)?.textContent ?? null;
  },
  async search(run, text, rows) {
    const words = text.toLowerCase();
    const texts = await Promise.all(rows.map(async (row) => (row.words ??= searchText(await record(run, row.n)))));
    return rows.filter((row, i) => texts[i].includes(words)).map((row) => row.n);
  },
};

function searchText(t) {
  const texts = [
    t.id,
    t.task_id,
    t.prompt,
    plainText(t.answer),
    t.error,
    ...t.turns.flatMap((turn) => [turn.text, turn.observation]),
  ];
  return texts
    .filter((text) => text !== null && text !== undefined)
    .join("\n")
    .toLowerCase();
}

/* The token is in the address behind "#", which a browser sends to nobody. */
const TOKEN = new URLSearchParams(location.hash.slice(1)).get("token");

async function get(path, parameters = {}, signal = null) {
  const url = new URL("api/" + path, location.href.split("#")[0]);
  for (const [name, value] of Object.entries(parameters)) if (value !== null) url.searchParams.set(name, value);
  const response = await fetch(url, { signal, headers: TOKEN ? { Authorization: `Bearer ${TOKEN}` } : {} });
  if (!response.ok && response.status !== 404) throw new Error(`${response.status} ${await response.text()}`);
  return response;
}

const liveSource = {
  live: true,
  async updates(run) {
    const counts = Object.fromEntries(LISTS.map((name) => [name, run[name].length]));
    const response = await (await get(`runs/${run.index}`, { generation: run.generation, ...counts })).json();
    const changed = addUpdates(run, response);
    return response.more ? (await liveSource.updates(run), true) : changed;
  },
  async record(run, number) {
    return (await get(`runs/${run.index}/trajectories/${number}`)).json();
  },
  async log(run, number) {
    const response = await get(`runs/${run.index}/trajectories/${number}/log`);
    return response.ok ? response.text() : "The log was deleted: the latest 1,000 are kept.";
  },
  async image(run, id) {
    const response = await get(`runs/${run.index}/images/${encodeURIComponent(id)}`);
    return response.ok ? URL.createObjectURL(await response.blob()) : null;
  },
  async search(run, text, rows, step, signal) {
    return (await get(`runs/${run.index}/search`, { text, step }, signal)).json();
  },
};

const source = START.live ? liveSource : embeddedSource;
const RECORDS_KEPT = 400;
const images = new Map();

/* A trajectory's record, which is kept while it is among the last ones shown. */
async function record(run, number) {
  if (!run.records.has(number)) {
    if (run.records.size >= RECORDS_KEPT) run.records.delete(run.records.keys().next().value);
    run.records.set(number, source.record(run, number));
    run.records.get(number).catch(() => run.records.delete(number)); // a later try may succeed
  }
  return run.records.get(number);
}

/* The address of an image, or null if the run did not keep it. Each image is fetched once. */
function imageAddress(run, id) {
  const key = `${run.index}/${id}`;
  if (!images.has(key))
    images.set(
      key,
      source.image(run, id).then((address) => {
        if (address === null) images.delete(key); // a run that goes on may still write it
        return address;
      }),
    );
  return images.get(key);
}
