// Everything foreign becomes text, never markup: `make` is the one way in which nodes are made here.
function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") node.className = value;
    else if (key === "style") Object.assign(node.style, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null) node[key] = value;
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

// The one place where markup comes in: what `views` made and escaped, linted by the tests, and nothing else. What was unfolded stays so.
function fromViews(node, html) {
  const folds = () => [...node.querySelectorAll("details")], name = (fold) => fold.querySelector("summary").textContent;
  const open = new Set(folds().filter((fold) => fold.open).map(name)), shut = new Set(folds().filter((fold) => !fold.open).map(name));
  node.innerHTML = html;
  folds().forEach((fold) => { fold.open = open.has(name(fold)) || (fold.open && !shut.has(name(fold))); });
}

// A line of work that the end of the kernel broke off says so, in the output of each cell of the page.
function breakOff() {
  const words = /( · about [^·]* left)? · (■ stops it|stopping at the next safe place)$/;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode;
    if (words.test(text.data)) text.data = text.data.replace(words, " · broken off: the kernel was restarted; run the cells above and this one again");
  }
}

// Questions to the kernel, each answered once. While one waits it is sent again, the rarer the longer it waits: a question or an answer
// that is lost on the way costs seconds. All copies have one id, and the kernel acts on an id once. The wait ends with the kernel alone:
// its connection ends (restarted), nothing can be sent any more (killed), or there is none (a saved notebook).
function talker(model, problem, below) {
  const restarted = `the kernel was restarted: ${model.get("again") || "run this cell again"}`;
  const page = Math.random().toString(36).slice(2);
  const waiting = new Map();
  const stop = make("button", { title: "stop at the next safe point; finished work is kept", onclick: () => model.send({ kind: "stop" }) }, "Stop");
  let number = 0, lost = "", clock = 0;
  function say(text) {
    if (lost || below.say(text, true) || !problem) return;
    problem.textContent = text;
    problem.classList.toggle("wb-wait", Boolean(text));
  }
  function lose(text) {
    lost = text;
    below.lost(text);
    waiting.forEach((found) => found.fail(text));
    waiting.clear();
  }
  function send(found) {
    found.sent = Date.now();
    try { model.send(found.question); } catch (_) { lose(restarted); }
  }
  function tick() {
    if (waiting.size && below.unconnected()) lose("no kernel is connected: run this cell again to make this view live");
    for (const found of waiting.values()) {
      const now = Date.now(), waits = now - found.since;
      if (!model.waits && now - found.sent >= Math.min(Math.max(4000, waits / 10), 60000)) send(found);
      if (found.work) say(found.line || `running ${found.work}: ${Math.round(waits / 1000)} s`);
      else if (waits >= 2000) say(model.waits || (below.under() ? "waiting for the kernel: a cell is running, and this view loads when it ends" : "waiting for the kernel: a cell is running"));
    }
    if (!waiting.size) clock = clearInterval(clock);
  }
  const listen = (message) => {
    const found = waiting.get(message.asked);
    if (!found) return;
    if (message.kind === "running") {
      if (!found.work) Object.assign(found, { work: message.text, since: Date.now() });
      if (found.work && problem) problem.after(stop);
      return;
    }
    if (message.kind === "progress") {
      say(found.line = message.text);
      return;
    }
    waiting.delete(message.asked);
    stop.remove();
    say("");
    if (message.kind === "error") {
      below.say(message.text);
      found.fail(message.text);
    } else {
      below.hide();
      found.done(message);
    }
  };
  model.on("comm_live_update", () => { lose(restarted); breakOff(); });
  model.on("msg:custom", listen);
  return {
    ask: (question) => new Promise((done, fail) => {
      if (lost) { fail(lost); return; }
      const asked = `${page} ${++number}`, found = { done, fail, since: Date.now(), question: { ...question, asked } };
      waiting.set(asked, found);
      send(found);
      clock = clock || setInterval(tick, 1000);
    }),
    end: () => { clearInterval(clock); model.off("msg:custom", listen); },
  };
}

// The switch between what a model wrote and that drawn as Markdown, LaTeX and code: the view remembers it, and `r` presses it.
function renderedSwitch(model, el, draw) {
  const button = make("button", {
    title: "Markdown, LaTeX and code drawn; plain is what the model wrote (key: r)", onclick: press,
  }, "rendered");
  const mark = () => { button.ariaPressed = String(Boolean(model.get("rendered"))); };
  async function press() {
    const focused = document.activeElement === button;
    model.set("rendered", !model.get("rendered"));
    model.save_changes();
    mark();
    await draw();
    if (focused) button.focus();
  }
  el.addEventListener("keydown", (event) => {
    if (event.key !== "r" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    event.stopPropagation();
    press();
  });
  mark();
  return button;
}

// One of the two is seen: the static form, in the output before this one, until this one has something to show, and again when it is
// gone or its kernel is. A page of any notebook has its outputs one after another: what is seen right before this one is looked at.
function overStatic(el, form = ".workbench-static") {
  const note = make("div", { class: "wb-note", role: "status" });
  let hidden = null, gone = false;
  el.classList.add("wb-under");
  el.append(note);
  const nothing = (box) => box.matches("style, script") || !(box.textContent.trim() || box.matches("img") || box.querySelector("img"));
  function before() {
    for (let box = el; box; box = box.parentElement || box.getRootNode().host) {
      let other = box.previousElementSibling;
      while (other && nothing(other)) other = other.previousElementSibling;
      if (other) return other.matches(form) || other.querySelector(form) ? other : null;
    }
    return null;
  }
  function restore() {
    gone = true;
    if (hidden) hidden.style.display = "";
    hidden = null;
  }
  function hide() {
    if (gone) return;
    el.classList.remove("wb-under");
    note.textContent = "";
    if (!el.isConnected) { setTimeout(hide, 100); return; }  // a front end may draw a view before it stands in the page
    if (!hidden || !hidden.isConnected) hidden = before();
    if (hidden) hidden.style.display = "none";
  }
  return {
    hide,
    restore,
    under: () => el.classList.contains("wb-under"),
    unconnected: () => el.closest(".jupyter-widgets-disconnected"),  // how ipywidgets marks a view whose model has no kernel
    // a word beside the static form; false where this one is seen, and has a place for it
    say: (text, wait = false) => {
      if (!el.classList.contains("wb-under")) return false;
      if (note.textContent !== text) note.textContent = text;
      note.classList.toggle("wb-wait", wait);
      return true;
    },
    lost: (text) => {
      restore();
      el.classList.add("wb-under");
      note.textContent = text;
      note.classList.remove("wb-wait");
      el.querySelectorAll("button, input, select, textarea").forEach((node) => { node.disabled = true; });
    },
  };
}

// The one way in which numbers are written, as `base.shown.number` has it: four digits, whole numbers below a million in full.
function said(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value), rounded = Number(value.toPrecision(digits));
  if (size && (size < 1e-3 || size >= 1e6)) return rounded.toExponential().replace("e+", "e");
  return String(Number.isInteger(value) ? value : rounded);
}

// What a button asks: all wait, the face is drawn anew, and what failed is said beside what then stands. `draw` gets a face,
// which says where it stands; another place than the object's moves nothing.
function mover(talk, problem, buttons, draw) {
  let stands = null;
  const drawn = (face) => {
    stands = face.stands;
    draw(face);
  };
  async function ask(question) {
    buttons.forEach((button) => { button.disabled = true; });
    try {
      drawn(await talk.ask({ ...question, stands }));
    } catch (text) {
      if (question.kind !== "look") await ask({ kind: "look" });  // what ran before it failed did run
      else buttons.forEach((button) => { button.disabled = false; });
      problem.textContent = text;
      problem.classList.remove("wb-wait");
    }
  }
  return { ask, drawn };
}

// A prompt's samples as dots at their rewards; a press picks one. Those of one reward lie apart by a few pixels.
function dotsOf(samples, [low, high], picked, pick) {
  const scored = samples.filter(([, reward]) => reward !== null);
  const mean = scored.reduce((sum, [, reward]) => sum + reward, 0) / scored.length;
  const times = new Map(), even = new Set(scored.map(([, reward]) => reward)).size === 1;
  return make("span", { class: "wb-dots", role: "group", ariaLabel: "rewards of the prompt's samples" }, scored.map(([row, reward]) => {
    const again = times.get(reward) || 0, share = high > low ? (reward - low) / (high - low) : 0.5;
    times.set(reward, again + 1);
    const name = `row ${row}, reward ${said(reward)}`, apart = (share > 0.5 ? -1 : 1) * Math.min(again * 2, 16);
    return make("button", { class: reward < mean ? "wb-below" : even ? "wb-even" : "", title: name, ariaLabel: name, ariaPressed: String(row === picked),
      style: { left: `calc(6px + ${(100 * share).toFixed(1)}% - ${(12 * share).toFixed(1)}px + ${apart}px)` },
      onclick: (event) => { event.stopPropagation(); pick(row); } });
  }));
}
