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

// The one place where markup comes in: what `views` made and escaped, linted by the tests, and nothing else.
function fromViews(node, html) {
  node.innerHTML = html;
}

// Messages to the kernel, each answered once. An answer that takes long (a cell is running) is waited for, and that is said. Where the
// kernel was restarted none will come: the connection ends, that is said, and the static form is the one that is left.
function talker(model, waitingFor, below) {
  const restarted = "the kernel was restarted: run this cell again";
  const late = [[2, "waiting for the kernel: is a cell running?"],
    [30, "no answer for half a minute: a cell is running, or the kernel is gone (then run this cell again)"]];
  let number = 0;
  let lost = false;
  const say = (text) => { if (!below.say(text)) waitingFor(text); };
  const settled = (found) => found.timers.forEach(clearTimeout);
  model.on("comm_live_update", () => {
    lost = true;
    below.lost(restarted);
    waiting.forEach((found) => { settled(found); found.fail(restarted); });
    waiting.clear();
  });
  const waiting = new Map();
  const listen = (message) => {
    const found = waiting.get(message.asked);
    if (!found) return;
    waiting.delete(message.asked);
    settled(found);
    say("");
    if (message.kind === "error") {
      below.say(message.text);
      found.fail(message.text);
    } else {
      below.hide();
      found.done(message);
    }
  };
  model.on("msg:custom", listen);
  return {
    ask: (question) => new Promise((done, fail) => {
      if (lost) { fail(restarted); return; }
      const asked = ++number;
      const timers = late.map(([seconds, text]) => setTimeout(() => say(text), 1000 * seconds));
      waiting.set(asked, { done, fail, timers });
      model.send({ ...question, asked });
    }),
    end: () => model.off("msg:custom", listen),
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
    if (hidden) hidden.style.display = "";
    hidden = null;
  }
  return {
    hide: () => {
      if (gone) return;
      el.classList.remove("wb-under");
      note.textContent = "";
      if (!hidden || !hidden.isConnected) hidden = before();
      if (hidden) hidden.style.display = "none";
    },
    restore,
    // a word beside the static form; false where this one is seen, and has a place for it
    say: (text) => {
      if (!el.classList.contains("wb-under")) return false;
      note.textContent = text;
      return true;
    },
    lost: (text) => {
      gone = true;
      restore();
      el.classList.add("wb-under");
      note.textContent = text;
      el.querySelectorAll("button, input, select, textarea").forEach((node) => { node.disabled = true; });
    },
  };
}

function said(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));
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
      problem.textContent = text;
      buttons.forEach((button) => { button.disabled = false; });
    }
  }
  return { ask, drawn };
}
