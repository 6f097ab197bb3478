const COUNT = 50;
const ORDERS = { worst: "worst first", best: "best first", surprising: "surprising first", index: "in row order" };

// A value on a scale that begins at 0 or below: a bar from 0, in the colour of its side.
function scaleOf(value, [low, high]) {
  const first = Math.min(low, 0), width = Math.max(high, 0) - first || 1;
  const at = (one) => 100 * (one - first) / width;
  const side = value < 0 ? "--wb-down" : "--wb-up";
  return make("span", { class: "wb-scale", ariaHidden: "true" },
    make("i", { style: { left: `${at(Math.min(value, 0))}%`, width: `${100 * Math.abs(value) / width}%`, background: `rgba(var(${side}), .75)` } }),
    first < 0 ? make("u", { style: { left: `${at(0)}%` } }) : null);
}

// A text in one line that is cut before its end: what a scorer reads is mostly the end.
const END = 12;
function endsOf(text) {
  if (text.length <= END) return make("div", {}, text);
  const word = text.indexOf(" ", text.length - END), at = word < 0 ? text.length - END : word;  // no word is cut in two
  return make("div", { class: "wb-tail" }, make("span", {}, text.slice(0, at)), make("span", {}, text.slice(at)));
}

// A reward: of rewards that are all 0 or 1 a chip, of others their bar.
function rewardOf(value, span, binary) {
  if (binary) return [make("span", { class: value ? "wb-chipped wb-good" : "wb-chipped" }, said(value))];
  return [scaleOf(value, span), make("span", { class: "wb-many" }, said(value))];
}

// A row's tokens as one line, as long as the row beside the longest one: a piece for some tokens, in the colour of their mean.
function stripOf({ one_way: oneWay, levels }, share) {
  const size = 100 / levels.length, side = (level) => (oneWay ? "--wb-much" : level < 0 ? "--wb-down" : "--wb-up");
  const pieces = levels.map((level, at) =>
    `rgba(var(${side(level)}), calc(${Math.abs(level) / 100} * var(--wb-strong))) ${(at * size).toFixed(1)}% ${((at + 1) * size).toFixed(1)}%`);
  return make("span", { class: "wb-strip", ariaHidden: "true",
    style: { width: `${Math.round(84 * share)}px`, backgroundImage: `linear-gradient(90deg, ${pieces.join(",")})` } });
}

function render({ model, el }) {
  const below = overStatic(el);
  const problem = make("span", { class: "wb-problem" });
  const talk = talker(model, problem, below);
  const known = model.get("known");
  const query = { ...model.get("query") };
  let columns = [], figures = new Set();  // of the page; those of numbers
  let tab = "";
  const rendered = renderedSwitch(model, el, () => (model.get("picked") === null ? null : pick(model.get("picked"))));
  let shown = [];
  let total = 0;
  let group = null, apart = false;  // of the last line drawn; whether each line names its prompt
  let spans = {};  // of rewards and advantages
  let asking = 0;

  const body = make("tbody");
  const count = make("span", { class: "wb-count", role: "status" });
  const detail = make("div", { class: "wb-detail", role: "group", ariaLabel: "the picked sample" });
  const classOf = (name) => `wb-c-${name.replace(/[^a-z]/gi, "-")}`;
  const heads = make("tr");
  const places = make("span"), all = make("button", { class: "wb-small", onclick: () => { high = high ? 0 : model.get("high"); fit(); } });
  const foot = make("td", {}, places, all);
  const table = make("table", {}, make("thead", {}, heads), body, make("tfoot", {}, make("tr", {}, foot)));
  const scroll = make("div", { class: "wb-scroll", tabIndex: 0, role: "group", ariaLabel: "samples; up and down pick one", onscroll: more }, table);
  let high = model.get("high");  // lines that are seen before the table scrolls; 0: as many as the window has place for
  const binary = model.get("bins").every(([first, last]) => first === last && (first === 0 || first === 1));

  const search = make("input", { type: "search", placeholder: "search texts", ariaLabel: "search texts", value: query.search || "", oninput: soon });
  const order = make("select", { ariaLabel: "order", onchange: () => { query.order = order.value; load(); } },
    ["worst", "best", "surprising", "index", ...known.flatMap((name) => [name, `-${name}`])]
      .map((name) => make("option", { value: name }, ORDERS[name] || (name.startsWith("-") ? `${name.slice(1)} ↓` : `${name} ↑`))));
  order.title = "surprising: rewards that are far from the mean of the prompt's other samples";
  order.value = query.order;
  const status = make("select", { ariaLabel: "status of the score", onchange: () => load() },
    make("option", { value: "" }, "any status"),
    model.get("statuses").map(([name, number]) => make("option", { value: name }, `${name} (${number})`)));
  const least = make("input", { type: "number", step: "any", placeholder: "reward ≥", ariaLabel: "least reward", oninput: soon });
  const greatest = make("input", { type: "number", step: "any", placeholder: "≤", ariaLabel: "greatest reward", oninput: soon });
  const grouped = make("input", { type: "checkbox", checked: query.by_group, onchange: () => { query.by_group = grouped.checked; load(); } });
  const toPandas = make("button", { title: "copy the line of code that makes a DataFrame of the rows shown now", onclick: copyCode }, "to pandas");
  const line = make("code", { class: "wb-code", role: "status" });
  const strip = make("select", { ariaLabel: "colour of the token strips", title: "the quantity that colours the token strips",
    onchange: () => { query.strip = strip.value; load(); } },
    model.get("strips").map((name) => make("option", { value: name }, `tokens by ${name}`)));
  const fold = make("button", { class: "wb-fold", ariaExpanded: "false", title: "order, filters, columns",
    onclick: () => { fold.ariaExpanded = String(fold.ariaExpanded === "false"); } }, "filters");  // on a narrow page
  const bar = make("div", { class: "wb-bar" }, search, fold, order, status, least, greatest, strip.options.length ? strip : null,
    make("label", {}, grouped, " by prompt"), chooser(), toPandas, count, problem, line);
  const tabs = model.get("tabs").map(([name, title], place) => make("button", {
    title, ariaPressed: String(!place), onclick: () => { turn(place); },
  }, name));
  const [headline, ...rest] = model.get("headline").split(" · ");
  const head = make("div", { class: "wb-bar" }, make("span", {}, make("span", { class: "wb-head" }, headline), rest.flatMap((one) => [" · ", counted(one)])),
    binary ? null : histogram(model.get("bins")));
  el.append(make("div", { class: "wb wb-samples", onkeydown: keys }, head,
    tabs.length > 1 ? make("div", { class: "wb-tabs", role: "group", ariaLabel: "rows" }, tabs) : null,
    bar, make("div", { class: "wb-two" }, scroll, detail)));

  // "40 no answer" or "10 wrong" in the headline shows these samples alone, and pressed again all
  function counted(words) {
    const kind = words.replace(/^\d+ /, ""), reward = { right: "1", wrong: "0" }[kind] || "";
    const name = reward ? "scored" : kind.replaceAll(" ", "_");
    if (kind === words || !model.get("statuses").some(([one]) => one === name)) return words;
    return make("button", { class: "wb-link", title: `show these samples alone: status ${name}${reward && `, reward ${reward}`}`, onclick: () => {
      const on = status.value === name && least.value === reward && greatest.value === reward;
      [status.value, least.value, greatest.value] = on ? ["", "", ""] : [name, reward, reward];
      load();
    } }, words);
  }

  function turn(place) {
    tab = place ? "left" : "";
    tabs.forEach((one, other) => { one.ariaPressed = String(other === place); });
    model.set("picked", null);
    model.save_changes();
    detail.replaceChildren();
    load();
  }
  // which columns are shown; the kernel remembers them for the next tables
  function chooser() {
    const boxes = known.map((name) => make("input", { type: "checkbox", value: name, onchange: () => {
      choose(boxes.filter((box) => box.checked).map((box) => box.value));
    } }));
    const mark = () => { boxes.forEach((box) => { box.checked = columns.includes(box.value); }); };
    return make("details", { class: "wb-columns", ontoggle: mark }, make("summary", { title: "choose the columns of the table" }, "columns"),
      make("div", {}, boxes.map((box) => make("label", {}, box, box.value)),
        make("button", { onclick: () => choose([]).then(mark) }, "the usual ones")));
  }
  function choose(names) {
    model.set("columns", names);
    model.save_changes();
    return load(0, { choose: names });
  }
  async function copyCode() {
    try {
      const { text } = await talk.ask({ ...question(), kind: "code" });
      try {
        await navigator.clipboard.writeText(text);
        line.textContent = `copied: ${text}`;
      } catch (_) { line.textContent = text; }  // the browser does not let this page copy: it can be selected
    } catch (text) { problem.textContent = text; }
  }

  // a bar a bin of the rewards: pressed, the table has its samples alone; pressed again, all
  function histogram(bins) {
    const most = Math.max(...bins.map((bin) => bin[2]), 1);
    const buttons = bins.map(([first, last, number]) => {
      const range = first === last ? said(first) : `${said(first)} to ${said(last)}`;
      const button = make("button", {
        class: "wb-bin", title: `${number} samples of reward ${range}`, ariaLabel: `${number} samples of reward ${range}`,
        onclick: () => {
          const off = button.ariaPressed === "true";
          buttons.forEach((one) => { one.ariaPressed = "false"; });
          button.ariaPressed = String(!off);
          least.value = off ? "" : first;
          greatest.value = off ? "" : last;
          load();
        },
      }, make("span", { style: { height: `${Math.max(2, Math.round(24 * number / most))}px` } }),
      bins.length < 7 || first === bins[0][0] || last === bins.at(-1)[1] ? said(first === bins[0][0] ? first : last, 2) : "\u00a0");
      button.ariaPressed = "false";
      return button;
    });
    return buttons.length ? make("div", { class: "wb-bins", role: "group", ariaLabel: "rewards" }, make("span", { class: "wb-hint" }, "reward"), buttons) : null;
  }

  // letters typed while an answer is under way are asked for together, when it is there
  let waiting = false, typed = false;
  async function soon() {
    typed = true;
    if (waiting) return;
    waiting = true;
    while (typed) {
      typed = false;
      await load();
    }
    waiting = false;
  }
  function sortBy(name) {
    query.order = query.order === `-${name}` ? name : `-${name}`;
    order.value = query.order;
    load();
  }
  function question() {
    query.search = search.value;
    const number = (input) => (input.value === "" ? null : Number(input.value));
    return { ...query, tab, status: status.value, low: number(least), high: number(greatest) };
  }
  async function load(start = 0, more = {}) {
    const mine = ++asking;
    try {
      const page = await talk.ask({ ...question(), kind: "rows", start, count: COUNT, ...more });
      if (mine !== asking) return;
      problem.textContent = "";
      total = page.total;
      below.hide();
      if (!start) {
        ({ columns, spans } = page);
        figures = new Set(columns.filter((name) => !["tokens", "reward"].includes(name) && page.rows.every(({ cells }) => name === "row" || typeof cells[name] !== "string")));
        table.style.setProperty("--reward", `${Math.max(0, ...page.rows.map(({ cells }) => said(cells.reward).length))}ch`);
        drawHeads();
        // under an order that mixes the prompts, each sample names its own
        apart = page.rows.filter((row, at) => row.group !== page.rows[at - 1]?.group).length > page.rows.length / 2;
        shown = []; group = null; body.replaceChildren(); scroll.scrollTop = 0; line.textContent = ""; foot.colSpan = columns.length;
      }
      for (const row of page.rows) {
        if (page.groups[row.group] && row.group !== group && !apart) body.append(over(row.group, page));
        group = row.group;
        shown.push(row.row);
        body.append(lineOf(row, apart && page.groups[row.group]?.[0]));
      }
      count.textContent = `${total} of ${page.of} samples${page.same ? ` · the same in all: ${page.same}` : ""}`;
      mark();
      fit();
    } catch (text) { problem.textContent = text; }
  }
  // as high as the `rows` of Python, within the window; lower than a page of rows, so that it scrolls to the next
  function fit() {
    const last = high && lines().slice(0, Math.max(high, 1)).at(-1);
    if (last?.offsetHeight) scroll.style.maxHeight = `min(${last.offsetTop + last.offsetHeight + foot.offsetHeight + 2}px, 80vh, 1000px)`;
    else scroll.style.maxHeight = "80vh";
    all.textContent = high ? "taller" : "shorter";
    more();
  }
  function more() {
    seen();
    if (scroll.clientHeight && shown.length < total && scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 80) load(shown.length);
  }
  // which of the rows are in sight
  function seen() {
    const top = scroll.scrollTop + heads.offsetHeight, end = scroll.scrollTop + scroll.clientHeight - foot.offsetHeight;
    const inside = lines().map((node) => node.offsetTop + node.offsetHeight / 2).filter((middle) => middle >= top && middle <= end);
    places.textContent = `${inside.length} of ${total} in sight: scroll for the others`;
    foot.parentNode.hidden = inside.length === total;
  }
  // the line over a prompt's samples: the prompt, a dot for each reward, what they are together
  function over(number, page) {
    const [prompt, words, dots] = page.groups[number];
    const rewards = dots.map(([, reward]) => reward).filter((reward) => reward !== null), sum = rewards.reduce((one, other) => one + other, 0);
    const short = rewards.length < 2 ? "" : rewards.every((one) => one === rewards[0]) ? "equal rewards" : (binary ? `${sum} of ${rewards.length} right` : `mean ${said(sum / rewards.length)}`);
    return make("tr", { class: "wb-group", title: words }, make("td", { colSpan: columns.length }, make("div", { class: "wb-over" },
      make("b", {}, `group ${number}`), make("span", { class: "wb-asked", title: prompt }, prompt),
      rewards.length > 1 ? dotsOf(dots, spans.reward, model.get("picked"), pick) : null, make("span", { class: "wb-hint" }, short))));
  }
  function drawHeads() {
    table.classList.toggle("wb-chosen", model.get("columns").length > 0);
    heads.replaceChildren(...columns.map((name) => {
      const way = { [name]: "ascending", [`-${name}`]: "descending" }[query.order];
      const cell = make("th", { class: classOf(name), title: `sort by ${name}`, tabIndex: 0, onclick: () => sortBy(name) },
        name, way ? (way === "ascending" ? " ↑" : " ↓") : "");
      if (way) cell.ariaSort = way;
      if (figures.has(name)) cell.classList.add("wb-figure");
      return cell;
    }));
  }
  const lineOf = (row, prompt) => make("tr", { onclick: () => pick(row.row) }, columns.map((name) => cellOf(name, row, prompt)));
  function cellOf(name, row, prompt) {
    const value = row.cells[name], cell = make("td", { class: classOf(name) }, said(value));
    if (typeof value === "string" && value) cell.title = value;
    if (figures.has(name)) cell.classList.add("wb-figure");
    if (name === "response" && value) {
      const asked = prompt ? [make("span", { class: "wb-hint", title: prompt }, prompt)] : [];
      cell.replaceChildren(make("div", { class: "wb-answered" }, ...asked, endsOf(said(value))));
    }
    if (value === null || value === undefined) return cell;
    if (name === "reward") cell.replaceChildren(...rewardOf(value, spans.reward, binary));
    if (name === "tokens" && row.strip?.levels.length) {
      cell.replaceChildren(make("span", { class: "wb-many" }, said(value)), stripOf(row.strip, value / spans.tokens[1]));
    }
    if (name === "advantage" && value) {
      const most = Math.max(...spans.advantage.map(Math.abs)), side = value < 0 ? "--wb-down" : "--wb-up";
      const shade = `rgba(var(${side}), calc(${(0.4 * Math.abs(value) / most).toFixed(2)} * var(--wb-strong)))`;
      cell.replaceChildren(make("span", { class: "wb-sign", style: { backgroundImage: `linear-gradient(${shade}, ${shade})` } }, said(value)));
    }
    return cell;
  }
  scroll.dataset.lmSuppressShortcuts = "true";  // keys are for the table here, not for Lab's cells
  const lines = () => [...body.children].filter((node) => !node.classList.contains("wb-group"));
  function mark() {
    const picked = model.get("picked");
    lines().forEach((node, place) => node.classList.toggle("wb-picked", shown[place] === picked));
    body.querySelectorAll(".wb-dots button").forEach((dot) => { dot.ariaPressed = String(dot.title.startsWith(`row ${picked},`)); });
  }
  async function pick(row) {
    model.set("picked", row);
    model.save_changes();
    mark();
    try {
      const card = await talk.ask({ kind: "pick", row, tab, rendered: model.get("rendered") });
      if (row !== model.get("picked")) return;
      const body = make("div");
      fromViews(body, card.html);
      detail.replaceChildren(...actions(row, card, body), body, pinning(row));
      body.parentNode.scrollTop = 0;
      more();
    } catch (text) { problem.textContent = text; }
  }
  // what can be done with a sample: seen token by token, laid over another of its prompt, copied, pinned
  function actions(row, card, body) {
    const told = make("span", { class: "wb-count", role: "status" });
    const shown = (question, pressed) => async () => {
      try {
        fromViews(body, (await talk.ask({ row, tab, ...question })).html);
        tabs.filter(Boolean).forEach((one) => { one.ariaPressed = String(one === pressed); });
      } catch (text) { told.textContent = text; }
    };
    const copied = (text) => async () => {
      try {
        await navigator.clipboard.writeText(await text());
        told.textContent = "copied";
      } catch (_) { told.textContent = "the browser does not let this page copy"; }
    };
    const other = make("select", { ariaLabel: "diff with another sample", onchange: () => shown(
      card.more.some(([kind]) => kind === other.value) ? { kind: other.value } : { kind: "diff", other: Number(other.value) }, other)() },
      make("option", { value: "" }, "diff with…"), card.more.map(([kind, name]) => make("option", { value: kind }, name)),
      card.siblings.map(([one, reward]) => make("option", { value: one }, `row ${one} (${said(reward)})`)));
    const whole = make("button", { ariaPressed: "true", onclick: () => pick(row) }, `row ${row}`);
    const token = make("button", { title: "token by token", ariaPressed: "false", onclick: () => shown({ kind: "tokens" }, token)() }, "tokens");
    const tabs = [whole, token, card.siblings.length || card.more.length ? other : null];
    return [
      make("div", { class: "wb-tabs", role: "group", ariaLabel: "what is shown of the sample" }, tabs),
      make("div", { class: "wb-bar" },
        card.siblings.length ? dotsOf([...card.siblings, [row, card.reward]].sort(([a], [b]) => a - b), spans.reward, row, pick) : null, rendered,
        make("button", { title: "the response's text", onclick: copied(async () => (await talk.ask({ kind: "text", row, tab })).text) }, "copy"),
        make("button", { title: card.code, onclick: copied(async () => card.code) }, "copy code"), told),
    ];
  }
  function pinning(row) {
    const expected = make("input", { type: "text", placeholder: "expected score", ariaLabel: "expected score", size: 14 });
    const note = make("input", { type: "text", placeholder: "note", ariaLabel: "note", size: 24 });
    const answer = make("span", { class: "wb-count" });
    const button = make("button", { onclick: async () => {
      try { answer.textContent = (await talk.ask({ kind: "pin", row, tab, expected: expected.value, note: note.value })).text; }
      catch (text) { answer.textContent = text; }
    } }, "pin");
    return make("div", { class: "wb-bar" }, button, expected, note, answer);
  }
  function keys(event) {
    if (event.target.matches("input, select")) return;
    if (event.key === "Enter" && event.target.tagName === "TH") event.target.click();
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!step || !shown.length) return;
    event.preventDefault();
    event.stopPropagation();
    const place = shown.indexOf(model.get("picked"));
    const next = Math.max(0, Math.min(shown.length - 1, place < 0 ? 0 : place + step));
    pick(shown[next]);
    lines()[next].scrollIntoView({ block: "nearest" });
  }
  load();
  return () => { talk.end(); below.restore(); };
}
export default { render };
