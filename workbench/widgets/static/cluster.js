function render({ model, el }) {
  const below = overStatic(el);
  const note = make("span", { class: "wb-problem" });
  const light = make("span", { class: "wb-count" });
  const body = make("div", { class: "wb-shown" });
  el.append(make("div", { class: "wb" }, make("div", { class: "wb-bar" }, light, note), body));
  const talk = talker(model, null, below);
  let shown = "";

  function draw() {
    const face = model.get("face");
    light.textContent = face.live ? "live" : "ended";
    note.textContent = face.note;
    if (face.html === shown) return;  // what is selected stays selected
    shown = face.html;
    fromViews(body, face.html);
  }
  model.on("change:face", draw);
  talk.ask({ kind: "opened" }).catch(() => {});
  draw();
  requestAnimationFrame(below.hide);
  return () => {
    model.off("change:face", draw);
    talk.ask({ kind: "shut" }).catch(() => {});
    talk.end();
    below.restore();
  };
}
export default { render };
