const LONG = 160;
const SPECIAL = /^(<\|.*\|>|<\/?s>|<eos>|<pad>)$/;

function render({ model, el }) {
  const below = overStatic(el);
  const problem = make("span", { class: "wb-problem" });
  const talk = talker(model, problem, below);
  const labels = model.get("labels");
  const choose = make("select", { ariaLabel: "colour by", onchange: recolour }, model.get("quantities").map((name) => make("option", { value: name }, name)));
  choose.value = model.get("colour");
  const what = make("span", { class: "wb-count" });
  const low = make("span"), high = make("span");
  const swatch = make("span", { class: "wb-legend" });
  const values = make("div", { class: "wb-values", role: "status" }, hint());
  const boxes = labels.map((label, number) => make("div", {
    class: "wb-tokens", tabIndex: 0, role: "group", ariaLabel: `${label}; arrow keys point at a token`, onkeydown: (event) => keys(event, number),
  }));
  boxes.forEach((box) => { box.dataset.lmSuppressShortcuts = "true"; });  // the arrows move here, not Lab's cells
  const titles = labels.map((label, number) => make("div", { class: "wb-title" }, label,
    make("span", { class: "wb-count" }, (model.get("judged") || [])[number] ? ` · ${model.get("judged")[number]}` : "")));
  const marks = make("div", { class: "wb-key" });
  el.append(make("div", { class: "wb" },
    make("div", { class: "wb-bar" }, "colour", choose, make("span", { class: "wb-ends" }, low, swatch, high), what, problem),
    make("div", { class: "wb-read" }, make("div", { class: "wb-texts" }, boxes.flatMap((box, place) => [titles[place], box]), marks), values)));
  let rows = [];
  let spans = [], order = [];  // a row's tokens by their places; a box's tokens as they stand
  let at = null, pinned = false;

  async function load() {
    try {
      const found = await talk.ask({ kind: "tokens" });
      rows = found.rows;
      spans = rows.map((row, number) => row.texts.map((text, place) => {
        const span = make("span", {}, text);
        Object.assign(span, { place, number });
        if (!row.own[place]) span.className = "wb-foreign";
        else if (row.rejected[place]) span.className = "wb-rejected";
        else if (row.clipped[place]) span.className = "wb-clipped";
        if (SPECIAL.test(text.trimEnd())) span.classList.add("wb-off");
        return span;
      }));
      order = [...spans];
      rows.forEach((row, number) => {
        const prompt = make("span", { class: "wb-off" }, row.prompt);
        boxes[number].append(prompt, ...(found.pairs.length ? [] : spans[number]));
        boxes[number].onmouseover = (event) => { if (!pinned) point(event.target); };
        boxes[number].onclick = (event) => pin(event.target);
        titles[number].append(make("span", { class: "wb-count" }, ` · ${row.texts.length} tokens`));
        if (row.prompt.length > LONG) fold(prompt, row.prompt, titles[number]);
      });
      if (found.pairs.length) align(found.pairs, found.aligned);
      legend();
      await recolour();
      below.hide();
    } catch (text) { problem.textContent = text; }
  }
  async function recolour() {
    if (!rows.length) return;  // they are on their way, and come with the colour that is chosen then
    const colour = choose.value;
    try {
      const found = await talk.ask({ kind: "colours", colour });
      if (colour !== choose.value) return;
      problem.textContent = "";
      const even = rows.every((row) => new Set((row.values[colour] || []).filter((_, place) => row.own[place])).size < 2);
      what.textContent = even ? `${found.what}: the same for all tokens of a row` : found.what;
      low.textContent = said(found.low);
      high.textContent = said(found.high);
      swatch.style.background = `linear-gradient(90deg, ${found.stops.join(", ")})`;
      spans.forEach((row, number) => row.forEach((span, place) => { span.style.background = found.colours[number][place]; }));
      model.set("colour", colour);
      model.save_changes();
    } catch (text) { problem.textContent = text; }
  }
  // a long prompt, most of it a template, is one line until it is wanted
  function fold(prompt, text, title) {
    const short = `… ${text.slice(-80).trimStart()}`;
    prompt.textContent = short;
    const button = make("button", { class: "wb-small", ariaPressed: "false", onclick: () => {
      const whole = button.ariaPressed !== "true";
      button.ariaPressed = String(whole);
      prompt.textContent = whole ? text : short;
    } }, "whole prompt");
    title.append(" ", button);
  }
  // two rows as lines above each other; what one of them lacks is hatched
  function align(pairs, words) {
    const same = rows[0].prompt === rows[1].prompt;
    boxes[0].before(titles[1], make("div", { class: "wb-hint" }, words, same ? "" : " Their prompts differ, too."));
    if (!same) {
      boxes.forEach((box, number) => box.prepend(make("div", { class: "wb-hint" }, `prompt of ${labels[number]}`)));
      boxes[0].append(...boxes[1].childNodes);
    }
    boxes[1].remove();
    order[0] = spans.flat();
    pairs.forEach(([common, [a, b], [c, d]]) => {
      const sides = [spans[0].slice(a, b), spans[1].slice(c, d)];
      if (common) sides[0].forEach((span, place) => { [span.twin, sides[1][place].twin] = [sides[1][place], span]; });
      boxes[0].append(make("span", { class: common ? "wb-pair" : "wb-pair wb-apart" }, sides.map((side) => make("div", { class: side.length ? "" : "wb-none" }, side.length ? side : "\u00a0"))),
        common && sides[0].at(-1).textContent.endsWith("\n") ? make("br") : "");
    });
  }
  // what marks of tokens mean, of those that are there
  function legend() {
    const meaning = { "wb-rejected": "rejected", "wb-clipped": "clipped", "wb-foreign": "not sampled by the model" };
    const there = Object.entries(meaning).filter(([name]) => boxes.some((box) => box.querySelector(`.${name}`)));
    marks.replaceChildren(make("span", {}, "grey: prompt and special tokens"), ...there.map(([name, words]) => make("span", { class: name }, words)));
  }
  function hint() {
    return make("span", { class: "wb-hint" }, "Point at a token for its numbers. A click pins its numbers, Esc unpins them.");
  }
  function pin(span) {
    if (span.place === undefined) return;
    pinned = !(pinned && span === at);
    point(span);
  }
  function point(span) {
    if (span.place === undefined) return;
    const sides = span.twin ? [span, span.twin].sort((one, other) => one.number - other.number) : [span], row = rows[span.number], place = span.place;
    if (at) at.classList.remove("wb-at");
    at = span;
    span.classList.add("wb-at");
    const mark = row.rejected[place] ? ", rejected" : row.own[place] ? "" : ", not sampled by the model";
    const names = Object.keys(row.values).concat(sides.length > 1 ? Object.keys(rows[1].values).filter((name) => !(name in row.values)) : []);
    const where = sides.map((one) => `${labels[one.number]}, token ${one.place} of ${rows[one.number].texts.length}`).join("; ");
    values.replaceChildren(make("b", {}, row.texts[place].trim() ? row.texts[place] : row.texts[place].replaceAll(" ", "␣")),
      make("span", { class: "wb-hint" }, `${where}, id ${row.ids[place]}${mark}${pinned ? ", pinned: Esc unpins" : ""}`),
      make("dl", {}, names.flatMap((name) => {
        const now = name === choose.value ? "wb-now" : "";
        const found = sides.map((one) => (rows[one.number].values[name] || [])[one.place]);
        const line = (title, numbers) => [make("dt", { class: now }, title.split(/(?<=_)/).flatMap((part) => [part, make("wbr")])),
          make("dd", { class: now }, [...new Set(numbers.map((one) => said(one)))].join(" → "))];
        return [line(name, found), name === "log_prob" ? line("probability", found.map((one) => one && Math.exp(one))) : []].flat();
      })));
  }
  // to the next token, in this row from its first one
  function keys(event, number) {
    if (event.key === "Escape") pinned = false;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const line = order[number] || [];
    if (!step || !line.length) return;
    event.preventDefault();
    const place = line.indexOf(at);
    const span = line[Math.max(0, Math.min(line.length - 1, place < 0 ? step : place + step))];
    pinned = true;
    point(span);
    span.scrollIntoView({ block: "nearest" });
  }
  load();
  return () => { talk.end(); below.restore(); };
}
export default { render };
