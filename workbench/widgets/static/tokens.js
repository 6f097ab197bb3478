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
  const values = make("div", { class: "wb-values", role: "status" }, "point at a token");
  const boxes = labels.map((label, number) => make("div", {
    class: "wb-tokens", tabIndex: 0, role: "group", ariaLabel: `${label}; arrow keys point at a token`, onkeydown: (event) => keys(event, number),
  }));
  boxes.forEach((box) => { box.dataset.lmSuppressShortcuts = "true"; });  // the arrows move here, not Lab's cells
  el.append(make("div", { class: "wb" },
    make("div", { class: "wb-bar" }, "colour", choose, low, swatch, high, what, problem),
    values, ...labels.flatMap((label, place) => [make("div", { class: "wb-title" }, label), boxes[place]])));
  let rows = [];
  let at = null;

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
        boxes[number].append(make("span", { class: "wb-off" }, row.prompt), ...spans);
        boxes[number].onmouseover = (event) => point(number, event.target);
      });
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
      what.textContent = found.what;
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
  function point(number, span) {
    if (span.place === undefined) return;
    const row = rows[number];
    if (at) at.classList.remove("wb-at");
    at = span;
    span.classList.add("wb-at");
    const numbers = Object.entries(row.values).map(([name, column]) => `${name} ${said(column[span.place], 4)}`);
    values.textContent = `${labels[number]}, token ${span.place} ${JSON.stringify(row.texts[span.place])}, id ${row.ids[span.place]}   ${numbers.join("   ")}`;
  }
  // to the next token, in this row from its first one
  function keys(event, number) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const spans = [...boxes[number].children].slice(1);
    if (!step || !spans.length) return;
    event.preventDefault();
    const from = at && at.parentNode === boxes[number] ? at.place + step : step;
    const span = spans[Math.max(0, Math.min(spans.length - 1, from))];
    point(number, span);
    span.scrollIntoView({ block: "nearest" });
  }
  load();
  return () => { talk.end(); below.restore(); };
}
export default { render };
