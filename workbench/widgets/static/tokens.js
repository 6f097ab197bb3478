const LONG = 160;

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
  let at = null, pinned = false;

  async function load() {
    try {
      rows = (await talk.ask({ kind: "tokens" })).rows;
      rows.forEach((row, number) => {
        const spans = row.texts.map((text, place) => {
          const span = make("span", {}, text);
          span.place = place;
          if (!row.own[place]) span.className = "wb-foreign";
          else if (row.rejected[place]) span.className = "wb-rejected";
          else if (row.clipped[place]) span.className = "wb-clipped";
          return span;
        });
        const prompt = make("span", { class: "wb-off" }, row.prompt);
        boxes[number].append(prompt, ...spans);
        boxes[number].onmouseover = (event) => { if (!pinned) point(number, event.target); };
        boxes[number].onclick = (event) => pin(number, event.target);
        titles[number].append(make("span", { class: "wb-count" }, ` · ${row.texts.length} tokens`));
        if (row.prompt.length > LONG) fold(prompt, row.prompt, titles[number]);
      });
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
      boxes.forEach((box, number) => [...box.children].slice(1).forEach((span, place) => {
        span.style.background = found.colours[number][place] || "";
      }));
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
  // what marks of tokens mean, of those that are there
  function legend() {
    const meaning = { "wb-rejected": "rejected", "wb-clipped": "clipped", "wb-foreign": "not the model's own" };
    const there = Object.entries(meaning).filter(([name]) => boxes.some((box) => box.querySelector(`.${name}`)));
    marks.replaceChildren(make("span", {}, "grey: prompt"), ...there.map(([name, words]) => make("span", { class: name }, words)));
  }
  function hint() {
    return make("span", { class: "wb-hint" }, "Point at a token for its numbers. A click keeps it here, Esc lets it go.");
  }
  function pin(number, span) {
    if (span.place === undefined) return;
    pinned = !(pinned && span === at);
    point(number, span);
  }
  function point(number, span) {
    if (span.place === undefined) return;
    const row = rows[number];
    if (at) at.classList.remove("wb-at");
    at = span;
    span.classList.add("wb-at");
    const mark = row.rejected[span.place] ? ", rejected" : row.own[span.place] ? "" : ", not the model's own";
    values.replaceChildren(make("b", {}, row.texts[span.place]),
      make("span", { class: "wb-hint" }, `${labels[number]}, token ${span.place} of ${row.texts.length}, id ${row.ids[span.place]}${mark}${pinned ? ", pinned: Esc unpins" : ""}`),
      make("dl", {}, Object.entries(row.values).flatMap(([name, column]) => {
        const now = name === choose.value ? "wb-now" : "";
        return [make("dt", { class: now }, name), make("dd", { class: now }, said(column[span.place]))];
      })));
  }
  // to the next token, in this row from its first one
  function keys(event, number) {
    if (event.key === "Escape") pinned = false;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const spans = [...boxes[number].children].slice(1);
    if (!step || !spans.length) return;
    event.preventDefault();
    const from = at && at.parentNode === boxes[number] ? at.place + step : step;
    const span = spans[Math.max(0, Math.min(spans.length - 1, from))];
    pinned = true;
    point(number, span);
    span.scrollIntoView({ block: "nearest" });
  }
  load();
  return () => { talk.end(); below.restore(); };
}
export default { render };
