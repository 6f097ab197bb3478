function render({ model, el }) {
  const talk = talker(model, el);
  const restore = overStatic(el);
  const names = model.get("names");
  const code = make("code", { class: "wb-code" });
  const problem = make("span", { class: "wb-problem" });
  const body = make("div");
  const press = (label, question) => make("button", { onclick: () => ask(question()) }, label);
  const next = press("next", () => ({ kind: "next" }));
  const back = press("back", () => ({ kind: "back" }));
  const phase = make("select", {}, names.map((name) => make("option", { value: name }, name)));
  const run = press("run until", () => ({ kind: "run", phase: phase.value }));
  const backTo = press("back to", () => ({ kind: "back to", phase: phase.value }));
  const buttons = [back, next, run, backTo];
  let position = null;
  el.append(make("div", { class: "wb" }, make("div", { class: "wb-bar" }, buttons, phase, code, problem), body));

  async function ask(question) {
    buttons.forEach((button) => { button.disabled = true; });
    try {
      const face = await talk.ask({ ...question, position }, 0);
      position = face.position;
      problem.textContent = face.note;
      if (face.code) code.textContent = face.code;
      fromViews(body, face.html);
      next.disabled = face.upcoming === null;
      back.disabled = face.position === 0;
      run.disabled = backTo.disabled = false;
      if (face.upcoming) next.title = `run ${face.upcoming}`;
    } catch (text) {
      if (question.kind !== "look") await ask({ kind: "look" });  // what ran before it failed did run
      problem.textContent = text;
      buttons.forEach((button) => { button.disabled = false; });
    }
  }
  ask({ kind: "look" });
  return () => { talk.end(); restore(); };
}
export default { render };
