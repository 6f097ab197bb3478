function render({ model, el }) {
  const below = overStatic(el);
  const problem = make("span", { class: "wb-problem" });
  const talk = talker(model, problem, below);
  const code = make("code", { class: "wb-code" });
  const body = make("div", { class: "wb-turns", tabIndex: 0, role: "group", ariaLabel: "the episode's turns" });
  body.dataset.lmSuppressShortcuts = "true";  // keys scroll here, and are not Lab's
  const press = (label, title, question) => make("button", { title, onclick: () => ask(question()) }, label);
  const turn = make("select", { ariaLabel: "turn", onchange: fill });
  const text = make("textarea", { rows: 2, ariaLabel: "text of the turn" });
  const chosen = () => (turn.value === "next" ? null : Number(turn.value));
  const next = press("next", "run one turn", () => ({ kind: "next" }));
  const back = press("back", "go back to before the last turn", () => ({ kind: "back", turn: face.turns.length - 1 }));
  const run = press("run", "run to the end of the episode", () => ({ kind: "run" }));
  const say = press("", "put the text in the field in this turn's place; later turns are removed",
    () => ({ kind: "say", turn: chosen(), text: text.value }));
  const buttons = [back, next, run, say];
  next.className = "wb-main";
  const rendered = renderedSwitch(model, el, () => ask({ kind: "look", rendered: model.get("rendered") }));
  const { ask, drawn } = mover(talk, problem, buttons, draw);
  let face = model.get("face");
  el.append(make("div", { class: "wb" }, body,
    make("div", { class: "wb-bar" }, next, run, back, rendered, code, problem),
    make("div", { class: "wb-bar" }, turn, text, say)));

  function fill() {
    const one = chosen();
    text.value = one === null ? "" : face.turns[one].text;
    say.textContent = one === null ? `write the ${face.next_stage} turn` : `replace turn ${one}`;
  }
  function draw(found) {
    const grown = face.turns.length < found.turns.length;
    face = found;
    problem.textContent = face.note || "";
    if (face.code) code.textContent = face.code;
    fromViews(body, face.html);
    if (grown) body.scrollTop = body.scrollHeight;
    const said = face.turns.map((one, place) => make("option", { value: place }, `turn ${place}, ${one.role}`));
    if (face.next_stage !== null) said.push(make("option", { value: "next" }, `next, ${face.next_stage}`));
    turn.replaceChildren(...said);
    turn.selectedIndex = said.length - 1;
    fill();
    next.disabled = run.disabled = face.next_stage === null;
    back.disabled = face.turns.length === 0;
    say.disabled = false;
  }
  // as a stepper's
  const redraw = () => drawn(model.get("face"));
  model.on("change:face", redraw);
  redraw();
  requestAnimationFrame(below.hide);
  return () => { model.off("change:face", redraw); talk.end(); below.restore(); };
}
export default { render };
