function render({ model, el }) {
  const below = overStatic(el);
  const problem = make("span", { class: "wb-problem" });
  const talk = talker(model, problem, below);
  const code = make("code", { class: "wb-code" });
  const sides = Object.entries(model.get("face").labels);
  const field = (name, options) => make("label", {}, name.replace("_", " "), fields[name] = make("input", { type: "number", ...options }));
  const fields = {};
  const settings = [
    field("temperature", { min: 0, max: 5, step: 0.1 }), field("top_p", { min: 0.05, max: 1, step: 0.05 }), field("max_tokens", { min: 1, step: 1 }),
  ];
  const system = make("textarea", { rows: 2, ariaLabel: "system message", placeholder: "system message" });
  const shows = make("button", { ariaExpanded: "false", title: "what the model reads before the first message", onclick: () => unfold(system.hidden) }, "system");
  const log = make("div", { class: "wb-log", role: "log", tabIndex: 0, ariaLabel: "conversation" });
  const text = make("textarea", { rows: 2, ariaLabel: "message", placeholder: "Say something. Enter sends, Shift+Enter begins a line.", onkeydown: keys });
  const truth = make("input", { type: "text", ariaLabel: "right answer", onkeydown: (event) => { if (event.key === "Enter") press("score"); } });
  const button = (label, title, kind, main) => make("button", { title, class: main ? "wb-main" : "", onclick: () => press(kind) }, label);
  const send = button("send", "both models answer, each in its own conversation (key: Enter)", "ask", true);
  const again = button("answer again", "sample other answers to the last message", "again");
  const fresh = button("new chat", "begin a new conversation; kept rows stay", "clear");
  const score = button("score it", "score the last answers with the chat's reward", "score");
  const or = make("span", { class: "wb-or" });
  const kept = make("span", { class: "wb-count" });
  const notes = make("div", { class: "wb-hint" });
  const buttons = [send, again, fresh, score];  // and those of the answers, which are drawn anew with each face
  const own = buttons.length;
  const opened = new Map();  // "turn side" → HTML of the answer's tokens
  let busy = false, live = null, face = null;
  text.dataset.lmSuppressShortcuts = system.dataset.lmSuppressShortcuts = truth.dataset.lmSuppressShortcuts = log.dataset.lmSuppressShortcuts = "true";
  const { ask, drawn } = mover(talk, problem, buttons, draw);
  el.append(make("div", { class: "wb wb-chat" },
    make("div", { class: "wb-bar" }, settings, shows, make("span", { class: "wb-push" }), fresh), system, notes, log, make("div", { class: "wb-say" }, text, send),
    make("div", { class: "wb-bar" }, again, or, make("label", {}, "right answer", truth), score, kept, problem, code)));

  function unfold(open) {
    system.hidden = !open;
    shows.ariaExpanded = String(open);
  }
  function keys(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    press("ask");
  }
  async function press(kind, more) {
    const said = kind === "again" ? face.turns.at(-1)?.text : text.value;
    const asks = kind === "ask" || kind === "again";
    if (busy || (asks && !said.trim())) return;
    const held = document.activeElement;
    busy = true;
    if (asks) {
      if (kind === "again") log.lastChild?.remove();
      pending(said);
      if (kind === "ask") text.value = "";
    }
    const values = Object.fromEntries(Object.entries(fields).map(([name, input]) => [name, input.value]));
    await ask({ kind, text: said, truth: truth.value, system: system.value, ...values, ...more });
    busy = false;
    if (asks && face.turns.at(-1)?.text !== said && !text.value) text.value = said;  // it failed
    if (!held.isConnected) log.focus();
    else if (held === send || held === again || held === score) held.focus();
  }
  // the message and, as they are sampled, its answers
  function pending(said) {
    live = Object.fromEntries(sides.map(([side]) => [side, make("div", { class: "wb-said" }, "…")]));
    log.append(exchange(said, (side) => live[side], !log.children.length));
    log.scrollTop = log.scrollHeight;
  }
  function exchange(said, body, first) {
    return make("div", { class: "wb-exchange" }, make("div", { class: "wb-you" }, said),
      make("div", { class: "wb-sides" }, sides.map(([side, label]) => make("div", { class: "wb-side" },
        make("div", { class: "wb-hint", title: label }, make("b", {}, side), first ? ` ${label}` : ""), body(side)))));
  }
  const hear = (message) => {
    if (message.kind !== "text" || !live) return;
    const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    live[message.side].textContent = message.text || "…";
    if (low) log.scrollTop = log.scrollHeight;  // who reads further up stays there
  };
  model.on("msg:custom", hear);

  function answer(turn, side, found, last) {
    if (!found) return make("div", { class: "wb-hint" }, "no answer");
    const key = `${turn} ${side}`;
    const body = make("div", { class: "wb-said" }, found.text);
    const shown = make("button", { class: "wb-small", ariaPressed: "false", title: "its tokens, coloured by their log-probs" , onclick: () => pressed(opened.has(key)) }, "tokens");
    async function pressed(close) {
      try {
        if (close) opened.delete(key);
        else opened.set(key, opened.get(key) || (await talk.ask({ kind: "tokens", turn, side })).html);
        if (close) body.replaceChildren(found.text);
        else fromViews(body, opened.get(key));
        shown.ariaPressed = String(!close);
      } catch (text) { problem.textContent = text; }
    }
    const keep = make("button", { class: "wb-small", title: "keep the message with this answer as a row for the next run", onclick: () => press("keep", { side }) }, "keep it");
    if (opened.has(key)) pressed(false);
    if (last) buttons.push(keep);
    return [body, make("div", { class: "wb-foot" }, make("span", { class: "wb-hint" }, found.note), found.whole ? shown : null, last ? keep : null)];
  }
  function draw(view) {
    const asked = live !== null;
    if (asked || view.turns.length < (face?.turns.length || 0)) opened.clear();
    [face, live] = [view, null];
    problem.textContent = view.note || "";
    if (view.code) code.textContent = view.code;
    Object.entries(fields).forEach(([name, input]) => { input.value = view.settings[name]; });
    system.value = view.settings.system;
    if (system.value) unfold(shows.ariaExpanded === "true");
    notes.replaceChildren(...view.notes.map((note) => make("div", {}, note)));
    buttons.length = own;
    const last = view.turns.length - 1;
    log.replaceChildren(...view.turns.map((turn, place) => exchange(turn.text, (side) => answer(place, side, turn.answers[side], place === last), !place)));
    log.scrollTop = log.scrollHeight;
    truth.value = view.turns.at(-1)?.truth || "";
    kept.textContent = view.kept ? `${view.kept} kept: wb.rows(chat.kept)` : "";
    buttons.forEach((one) => { one.disabled = false; });
    again.disabled = score.disabled = last < 0;
    or.hidden = score.hidden = truth.parentNode.hidden = !view.scores;
  }
  unfold(false);
  const redraw = () => drawn(model.get("face"));
  model.on("change:face", redraw);
  redraw();
  requestAnimationFrame(below.hide);
  return () => { model.off("change:face", redraw); model.off("msg:custom", hear); talk.end(); below.restore(); };
}
export default { render };
