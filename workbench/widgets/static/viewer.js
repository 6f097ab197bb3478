// The page of `workbench view`: the same widgets, whose model is this machine's server in place of a kernel.
const base = new URL(".", import.meta.url);

// what a widget's script uses of anywidget's model
function modelOf(place) {
  const state = JSON.parse(place.dataset.state);
  const heard = new Map();
  const emit = (event, ...said) => (heard.get(event) || []).forEach((listener) => listener(...said));
  const changed = new Set();
  async function post(body) {
    const answer = await fetch(new URL(`ask/${place.dataset.widget}`, base), { method: "POST", body: JSON.stringify(body) });
    if (!answer.ok) throw new Error((await answer.json()).detail);
    return answer.json();
  }
  return {
    waits: "waiting for workbench view",  // each request has an answer or fails: none is sent again
    emit,
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; changed.add(name); emit(`change:${name}`); },
    save_changes: () => {
      const values = Object.fromEntries([...changed].map((name) => [name, state[name]]));
      changed.clear();
      post({ values }).catch(() => {});
    },
    on: (event, listener) => heard.set(event, [...(heard.get(event) || []), listener]),
    off: (event, listener) => heard.set(event, (heard.get(event) || []).filter((one) => one !== listener)),
    send: (content) => post({ content }).catch((error) => ({
      kind: "error", asked: content.asked, text: error instanceof TypeError ? "no answer: is workbench view still running?" : error.message,
    })).then((reply) => emit("msg:custom", reply)),
  };
}

const models = [...document.querySelectorAll("[data-widget]")].map((el) => {
  const model = modelOf(el);
  import(new URL(`script/${el.dataset.kind}.js`, base)).then((module) => module.default.render({ model, el }));
  return model;
});

const filter = document.querySelector("[data-filter]");
if (filter) {
  filter.addEventListener("input", () => document.querySelectorAll("tbody tr").forEach((row) => {
    row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase());
  }));
  filter.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
}

// the table of runs is sorted by the column whose head is pressed, numbers as numbers; a second press turns it over
document.querySelectorAll(".runs th").forEach((head, column, heads) => {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const down = head.ariaSort !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.ariaSort = down ? "descending" : "ascending";
    const key = (row) => row.cells[column].textContent;
    const order = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
    const number = (row) => (key(row) === "–" ? -Infinity : Number(key(row)));
    const by = head.classList.contains("number") ? (a, b) => number(a) - number(b) || 0 : order;
    const body = document.querySelector(".runs tbody");
    body.append(...[...body.rows].sort((a, b) => (down ? by(b, a) : by(a, b))));
  });
});

// A run that goes on: when it has written something, the views are drawn anew and the curves go on; what is open stays open.
const told = document.getElementById("said");
async function look() {
  try {
    const answer = await fetch(new URL(`fresh?page=${encodeURIComponent(told.dataset.page)}&stamp=${encodeURIComponent(told.dataset.stamp)}`, base));
    const fresh = await answer.json();
    if (!answer.ok) throw new Error(fresh.detail);
    if (fresh.stamp !== told.dataset.stamp) {
      Object.entries(fresh.parts).forEach(([id, html]) => {
        const node = document.getElementById(id);
        const open = [...node.querySelectorAll("details")].map((one) => one.open);
        fromViews(node, html);
        node.querySelectorAll("details").forEach((one, place) => { one.open = open[place] ?? one.open; });
      });
      models.forEach((model) => model.emit("change:version"));
    }
    told.dataset.stamp = fresh.stamp;
    told.textContent = fresh.stamp ? "live: this page follows the run" : "the run has ended";
  } catch (error) {
    told.textContent = `no answer (${error.message}): is workbench view still running?`;
  }
  if (told.dataset.stamp) setTimeout(look, 2500);
}
if (told) look();
