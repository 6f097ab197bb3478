function render({ model, el }) {
  const below = overStatic(el);
  const problem = make("span", { class: "wb-problem" });
  const talk = talker(model, problem, below);
  const names = model.get("names");
  const code = make("code", { class: "wb-code" });
  const row = make("div", { class: "wb-chips", role: "group", ariaLabel: "phases" });
  const line = make("div", { class: "wb-times", role: "img", ariaLabel: "time of the phases" });
  const body = make("div", { class: "wb-shown" });
  const groups = make("div", { class: "wb-groups" });
  const card = make("div", { class: "wb-shown" });
  const press = (label, question) => make("button", { ariaLabel: label, onclick: () => ask(question()) }, label);
  const next = press("next", () => ({ kind: "next" }));
  next.className = "wb-main";
  const back = press("back", () => ({ kind: "back" }));
  const phase = make("select", { ariaLabel: "phase" }, names.map((name) => make("option", { value: name }, name)));
  const run = press("run until", () => ({ kind: "run", phase: phase.value }));
  const backTo = press("back to", () => ({ kind: "back to", phase: phase.value }));
  phase.value = names[names.length - 1];
  const own = [back, next, run, backTo];
  const buttons = [...own];  // and those of the phases, which are drawn anew with each face
  let pressed = null;  // the phase whose button has the keyboard
  const { ask, drawn } = mover(talk, problem, buttons, draw);
  el.append(make("div", { class: "wb" }, line, row, make("div", { class: "wb-bar" }, next, back, make("span", { class: "wb-or" }), phase, run, backTo, code, problem),
    make("div", { class: "wb-step" }, body, groups), card));

  // a phase that has run is a button that shows it, the stepper staying where it stands, with ↶ to go back to before it
  function chip(one, shown) {
    const parts = one.name.split(/(?<=_)/).flatMap((part) => [part, make("wbr")]);  // a long name breaks after an underscore
    const name = make("span", { class: "wb-phase", title: one.name }, `${one.mark} `, parts);
    if (one.mark !== "●") {
      const next = one.mark === "▶";
      return make("span", { class: `wb-chip ${next ? "wb-next" : "wb-ahead"}`, title: "has not run yet" },
        make("span", { class: "wb-look" }, name, make("small", {}, next ? "next" : "")));
    }
    const look = make("button", {
      class: "wb-look", title: `show what ${one.name} wrote; the stepper does not move`, ariaPressed: String(one.name === shown),
      onclick: () => { pressed = one.name; ask({ kind: "show", phase: one.name }); },
    }, name, make("small", { title: one.headline }, [one.time, one.headline].filter(Boolean).join(" · ")));
    const undo = make("button", {
      class: "wb-undo", title: `back to before ${one.name}`, ariaLabel: `back to before ${one.name}`,
      onclick: () => ask({ kind: "back to", phase: one.name }),
    }, "↶");
    buttons.push(look, undo);
    return make("span", { class: "wb-chip wb-done" }, look, undo);
  }

  // a sample of the phase in full, or all of them, under the groups
  async function open(phase, row) {
    try {
      const found = await talk.ask({ kind: "samples", phase, row });
      code.textContent = found.code;
      fromViews(card, found.html);
      groups.querySelectorAll(".wb-dots button").forEach((dot) => { dot.ariaPressed = String(dot.title.startsWith(`row ${row},`)); });
      groups.querySelectorAll(".wb-samples-of").forEach((group) => group.classList.toggle("wb-open", Boolean(group.querySelector("[aria-pressed=true]"))));
      card.scrollIntoView({ block: "nearest" });
    } catch (text) { problem.textContent = text; }
  }

  function grouped(one, phase, span) {
    const answers = one.answers.map(([number, reward, text]) => make("button", {
      class: "wb-answer", title: `show row ${number} in full`, onclick: () => open(phase, number),
    }, make("b", {}, reward), make("span", {}, text)));
    return make("div", { class: "wb-samples-of" }, make("div", { class: "wb-asked", title: one.prompt }, one.prompt),
      make("div", {}, one.dots.length ? dotsOf(one.dots, span, null, (number) => open(phase, number)) : null, make("div", { class: "wb-hint" }, one.words)),
      make("div", {}, answers));
  }

  function draw(face) {
    problem.textContent = face.note || "";
    problem.classList.toggle("wb-wait", Boolean(face.note));
    if (face.code) code.textContent = face.code;
    buttons.length = own.length;
    row.replaceChildren(...face.chips.map((one) => chip(one, face.shown)));
    line.replaceChildren(...face.chips.filter((one) => one.mark === "●").map((one) => make("i", {
      class: one.name === face.shown ? "wb-now" : "", title: `${one.name}: ${one.time}, ${one.share} of the time`, style: { width: one.share },
    }, parseFloat(one.share) >= 20 ? `${one.name} ${one.share}` : "")));
    fromViews(body, face.html);
    const rewards = face.groups.flatMap((one) => one.dots.map(([, reward]) => reward));
    const span = [Math.min(...rewards), Math.max(...rewards)];
    const all = make("button", { onclick: () => open(face.shown) }, "show the samples as a table");
    const head = make("div", { class: "wb-bar" }, all, make("span", { class: "wb-hint" }, rewards.length ? "groups whose rewards differ most come first; click a dot or an answer to open its sample" : "click an answer to open its sample"));
    const titles = rewards.length ? ["prompt", `rewards, ${said(span[0])} to ${said(span[1])}: mean ± deviation`, "best and worst answer"] : ["prompt", "", "first answer"];
    const names = titles.map((title) => make("div", { class: "wb-names" }, title));
    groups.replaceChildren(...(face.groups.length ? [head, ...names] : []), ...face.groups.map((one) => grouped(one, face.shown, span)));
    card.replaceChildren();
    next.disabled = face.next_stage === null;
    back.disabled = face.stands === 0;
    run.disabled = backTo.disabled = false;
    next.title = face.next_stage ? `run ${face.next_stage}` : "";
    next.textContent = face.next_stage ? `next: ${face.next_stage}` : "next";
    if (pressed === face.shown) row.querySelector("[aria-pressed=true]")?.focus();
    pressed = null;
  }
  // what stood here when the cell ended; where this is the stepper's last view, a later cell that moves the stepper draws it anew
  const redraw = () => drawn(model.get("face"));
  model.on("change:face", redraw);
  redraw();
  requestAnimationFrame(below.hide);
  return () => { model.off("change:face", redraw); talk.end(); below.restore(); };
}
export default { render };
