function render({ model, el }) {
  const below = overStatic(el);
  const problem = make("span", { class: "wb-problem" });
  const talk = talker(model, (text) => { problem.textContent = text; }, below);
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
  const { ask, drawn } = mover(talk, problem, buttons, draw);
  el.append(make("div", { class: "wb" }, make("div", { class: "wb-bar" }, buttons, phase, code, problem), body));

  function draw(face) {
    problem.textContent = face.note || "";
    if (face.code) code.textContent = face.code;
    fromViews(body, face.html);
    next.disabled = face.next_stage === null;
    back.disabled = face.stands === 0;
    run.disabled = backTo.disabled = false;
    next.title = face.next_stage ? `run ${face.next_stage}` : "";
  }
  // what stood here when the cell ended: the stepper may have moved on since, and a button says so
  drawn(model.get("face"));
  requestAnimationFrame(below.hide);
  return () => { talk.end(); below.restore(); };
}
export default { render };
