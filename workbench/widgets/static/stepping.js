function render({ model, el }) {
  const below = overStatic(el);
  const problem = make("span", { class: "wb-problem" });
  const talk = talker(model, (text) => { problem.textContent = text; });
  const names = model.get("names");
  const code = make("code", { class: "wb-code" });
  const body = make("div");
  const press = (label, question) => make("button", { onclick: () => ask(question()) }, label);
  const next = press("next", () => ({ kind: "next" }));
  const back = press("back", () => ({ kind: "back" }));
  const phase = make("select", {}, names.map((name) => make("option", { value: name }, name)));
  const run = press("run until", () => ({ kind: "run", phase: phase.value }));
  const backTo = press("back to", () => ({ kind: "back to", phase: phase.value }));
  phase.value = names[names.length - 1];
  const buttons = [back, next, run, backTo];
  let position = null;
  el.append(make("div", { class: "wb" }, make("div", { class: "wb-bar" }, buttons, phase, code, problem), body));

  function draw(face) {
    position = face.position;
    problem.textContent = face.note || "";
    if (face.code) code.textContent = face.code;
    fromViews(body, face.html);
    next.disabled = face.upcoming === null;
    back.disabled = position === 0;
    run.disabled = backTo.disabled = false;
    next.title = face.upcoming ? `run ${face.upcoming}` : "";
  }
  async function ask(question) {
    buttons.forEach((button) => { button.disabled = true; });
    try {
      draw(await talk.ask({ ...question, position }));
    } catch (text) {
      if (question.kind !== "look") await ask({ kind: "look" });  // what ran before it failed did run
      problem.textContent = text;
      buttons.forEach((button) => { button.disabled = false; });
    }
  }
  // what stood here when the cell ended: the stepper may have moved on since, and a button says so
  draw(model.get("face"));
  requestAnimationFrame(below.hide);
  return () => { talk.end(); below.restore(); };
}
export default { render };
