// Curves of runs: uPlot draws on canvases, and every name is a text node of ours beside them.
const HEIGHT = 150;
const DASHES = [[], [2, 3], [7, 4]];

// A running mean over the numbers that there are, unbiased from the start, as `views` has it.
function smoothed(values, weight) {
  let sum = 0, weights = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    weights = weight * weights + 1;
    return sum / weights;
  });
}

function parts(colour) {
  const found = colour.match(/[\d.]+/g).map(Number);
  return colour.startsWith("#") ? [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)) : found.slice(0, 3);
}

// The page's own colours, read when something is drawn: a theme may change. On a dark page lines are paler. A front end may draw a
// view before it stands in the page, where it has no colour yet.
function inks(el) {
  const [red, green, blue] = parts(getComputedStyle(el.isConnected ? el : document.body).color);
  const dark = red + green + blue > 384;
  const mix = (colour) => parts(colour).map((part) => Math.round(dark ? part + (255 - part) * 0.35 : part));
  return {
    text: (alpha) => `rgba(${red},${green},${blue},${alpha})`,
    line: (colour, alpha = 1) => `rgba(${mix(colour).join(",")},${alpha})`,
    faint: dark ? 0.5 : 0.35,
  };
}

// As the static form has it: from 0 where the numbers come near it, and a constant gets ±10 %, not digits of noise.
function spread(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) [low, high] = [low - Math.abs(low) * 0.1, high + (Math.abs(high) * 0.1 || 0.1)];
  if (low >= 0 && low <= high / 2) low = 0;
  const margin = 0.05 * (high - low);
  return [low - margin, high + margin];
}

// The same, with room for a band: at most three times the height of the lines.
function roomy([low, high], lines) {
  const ends = lines.flatMap((line) => (line.band ? [line.band[1], line.band[2]] : [])).flat().filter((one) => one !== null);
  if (!ends.length || low === null || high === null) return spread(low, high);
  const [least, most] = ends.reduce(([least, most], one) => [Math.min(least, one), Math.max(most, one)], [low, high]);
  const beyond = low - least + most - high, room = 3 * Math.max(high - low, 0.1 * Math.max(Math.abs(low), Math.abs(high)));
  const share = beyond ? Math.min(room / beyond, 1) : 0;
  return spread(low - (low - least) * share, high + (most - high) * share);
}

// Whether a plot has one number at all steps: it is named beneath the others.
function isFlat(plot) {
  const values = new Set(plot.lines.flatMap((line) => line.values.filter((one) => one !== null)));
  return values.size === 1 && plot.lines.some((line) => line.values.length > 2);
}

function swatch(colour, dash = 0) {
  return make("i", { class: "wb-swatch", style: { borderTop: `3px ${["solid", "dotted", "dashed"][dash % 3]} ${colour}` } });
}

const draws = (plot, mark) => plot.lines.some((line) => line.name === mark.metric);

// One plot: its canvas, the line above it with the values at the cursor, the marks over it.
function plotted(plot, all, look, on) {
  const values = make("span", { class: "wb-at-cursor" });
  const host = make("div", { class: "wb-canvas", tabIndex: 0, role: "group" });
  host.dataset.lmSuppressShortcuts = "true";  // arrow keys move the cursor here, not Lab's cells
  host.addEventListener("mousemove", () => { look.pointed = self; }, true);
  host.addEventListener("mouseleave", () => { look.pointed = null; });
  const words = [...new Set(plot.lines.map((line) => line.words))];
  const head = make("div", { class: "wb-plot-head" }, make("b", { title: plot.title }, plot.title));
  const notes = make("ol", { class: "wb-marks" });
  const node = make("section", { class: "wb-plot" }, head, host, notes);
  if (words.length > 1) notes.before(values); else head.append(values);
  let drawn = null, marks = [], lines = [];

  const positive = (column) => (look.log ? column.map((value) => (value > 0 ? value : null)) : column);

  // a faint line of the step's own numbers under the strong one of their mean
  function data() {
    const faint = look.smooth > 0 ? lines.filter((line) => line.smoothed) : [];
    lines.forEach((line) => {
      line.mean = line.smoothed && look.smooth > 0 ? smoothed(line.values, look.smooth) : line.values;
    });
    return { faint, columns: [all.steps, ...faint.map((line) => positive(line.values)), ...lines.map((line) => positive(line.mean))] };
  }

  function series(faint) {
    const ink = (line, alpha) => () => look.ink.line(line.colour, alpha);
    const alone = (u, at) => u.data[at].reduce((count, value) => count + (value !== null), 0) < 2;
    const dots = { show: true, size: 7, width: 1 };
    return [
      {},
      ...faint.map((line) => ({ stroke: ink(line, look.ink.faint), width: 1, spanGaps: true, points: { show: false } })),
      ...lines.map((line) => (line.dots
        ? { stroke: ink(line), paths: () => null, points: { ...dots, fill: ink(line), stroke: ink(line) } }
        : { stroke: ink(line), width: 2, dash: DASHES[line.dash % DASHES.length], spanGaps: true,
            points: { ...dots, show: alone, fill: ink(line), stroke: ink(line) } })),
    ];
  }

  function bands(u) {  // under the lines, in their colour
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const { min, max } = u.scales.y;
    for (const { band, colour, mean } of lines.filter((line) => line.band && !look.log)) {
      const there = all.steps.map((_, at) => at).filter((at) => band[1][at] !== null && mean[at] !== null);
      const layers = there.some((at) => band[1][at] < min || band[2][at] > max) ? 8 : 1;  // a band that is cut fades towards its ends
      ctx.fillStyle = look.ink.line(colour, layers > 1 ? 0.04 : 0.14);
      for (let layer = 1; layer <= layers; layer++) {
        const to = (at, end) => ctx.lineTo(u.valToPos(all.steps[at], "x", true),
          u.valToPos(mean[at] + (Math.min(Math.max(end[at], min), max) - mean[at]) * (layer / layers) ** 2, "y", true));
        ctx.beginPath();
        there.forEach((at) => to(at, band[2]));
        there.toReversed().forEach((at) => to(at, band[1]));
        ctx.fill();
      }
    }
    ctx.restore();
  }

  // a symptom stands in the plot of its metric, elsewhere it is a pale line; where no plot has the metric, in all of them
  const isHere = (mark) => draws(plot, mark) || !all.plots.some((one) => draws(one, mark));

  function below(u) {  // what lies on the step axis: steps with samples, and symptoms
    const { ctx, bbox } = u;
    const pixel = (step) => Math.round(u.valToPos(step, "x", true));
    const inside = (step) => step >= u.scales.x.min && step <= u.scales.x.max;
    ctx.save();
    ctx.fillStyle = look.ink.text(0.6);
    const traced = new Set(all.runs.flatMap((run) => run.traces));
    traced.forEach((step) => { if (inside(step)) ctx.fillRect(pixel(step) - 1, bbox.top + bbox.height - 5, 2, 5); });
    ctx.strokeStyle = look.ink.line("#b4402a", 0.8);
    ctx.setLineDash([4, 4]);
    all.marks.filter((mark) => inside(mark.step)).forEach((mark) => {
      ctx.globalAlpha = isHere(mark) ? 1 : .25;
      ctx.beginPath();
      ctx.moveTo(pixel(mark.step), bbox.top);
      ctx.lineTo(pixel(mark.step), bbox.top + bbox.height);
      ctx.stroke();
    });
    ctx.restore();
    marks.forEach((node, at) => {
      const step = all.marks[at].step;
      Object.assign(node.style, { display: inside(step) && isHere(all.marks[at]) ? "" : "none", left: `${u.valToPos(step, "x") + 15 * all.marks.slice(0, at).filter((one) => one.step === step && isHere(one)).length}px` });
    });
  }

  function build() {
    if (drawn) drawn.destroy();
    lines = plot.lines;
    const { faint, columns } = data();
    const axis = { stroke: () => look.ink.text(0.8), grid: { stroke: () => look.ink.text(0.12), width: 1 }, ticks: { show: false }, font: "11px sans-serif" };
    drawn = new uPlot({
      width: Math.max(host.clientWidth, 120), height: HEIGHT, legend: { show: false }, padding: [all.marks.length ? 18 : 8, 8, 0, 0],
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: look.log ? { distr: 3 } : { range: (_, low, high) => roomy([low, high], lines) },
      },
      axes: [
        { ...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000], space: 60 },
        { ...axis, size: 52, space: 30, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : said(tick))) },
      ],
      series: series(faint),
      hooks: {
        // also called for plots that only follow: the pointer is in one
        setCursor: [(u) => { if (look.pointed === self && Number.isInteger(u.cursor.idx)) on.cursor(self, u.cursor.idx); }],
        // a canvas that has been replaced may still tell its scale
        setScale: [(u, key) => { if (key === "x" && u === drawn) on.zoom(u.scales.x.min, u.scales.x.max); }],
        drawAxes: [bands],
        draw: [below],
      },
    }, columns, host);
    marks = all.marks.map((mark, at) => make("span", { class: "wb-mark", title: mark.text }, String(at + 1)));
    drawn.over.append(...marks);
    let pressed = 0;
    drawn.over.addEventListener("mousedown", (event) => { pressed = event.clientX; host.focus({ preventScroll: true }); });
    drawn.over.addEventListener("click", (event) => {
      const still = event.detail < 2 && Math.abs(event.clientX - pressed) < 4;  // no drag, no second click of two
      const { left, top } = drawn.over.getBoundingClientRect();  // a touch moves no cursor before
      const at = drawn.posToIdx(event.clientX - left);
      if (still) on.open(nearest(at, event.clientY - top), at);
    });
    drawn.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== host) return;  // a page is scrolled over a plot that nobody chose
      event.preventDefault();
      zoomed(event.deltaY < 0 ? 0.7 : 1 / 0.7, drawn.posToVal(drawn.cursor.left, "x"));
    }, { passive: false });
  }

  function zoomed(factor, around) {
    const { min, max } = drawn.scales.x;
    const first = all.steps[0], last = all.steps[all.steps.length - 1];
    if ((max - min) * factor < 2) return;
    on.zoom(Math.max(around - (around - min) * factor, first), Math.min(around + (max - around) * factor, last));
  }

  // the run whose line is the nearest to a place of the pointer
  function nearest(at, top) {
    const here = lines.filter((line) => line.values[at] !== null);
    const far = (line) => Math.abs(drawn.valToPos(line.mean[at], "y") - top);
    return (here.length ? here.reduce((best, line) => (far(line) < far(best) ? line : best)) : lines[0])?.run ?? 0;
  }

  // held-out values are measured at few steps: between them the last one stands
  const valueOf = (line, at) => (line.dots ? line.values.slice(0, at + 1).findLast((value) => value !== null) ?? null : line.values[at]);
  const self = {
    node, notes, build, zoomed, nearest, host,
    size: () => { if (drawn && host.clientWidth && host.clientWidth !== drawn.width) drawn.setSize({ width: host.clientWidth, height: HEIGHT }); },
    zoom: (min, max) => { if (drawn.scales.x.min !== min || drawn.scales.x.max !== max) drawn.setScale("x", { min, max }); },
    show(at, quiet) {  // the cursor at a step, and the values there above the plot
      if (!quiet) {
        const left = drawn.valToPos(all.steps[at], "x");
        drawn.setCursor({ left, top: HEIGHT / 3 }, false);
      }
      values.replaceChildren(...lines.map((line) => make("span", { class: "wb-value" },
        swatch(look.ink.line(line.colour), line.dots ? 1 : line.dash), words.length > 1 ? `${line.words} ` : "", said(valueOf(line, at)),
        line.band ? make("span", { class: "wb-count", title: "the band around the line" }, ` band: ${line.band[0]}`) : "")));
    },
    text: (at) => lines.filter((line) => line.values[at] !== null).map((line) => {
      const mean = line.smoothed && look.smooth > 0 ? ` (running mean ${said(line.mean[at])})` : "";
      const band = line.band && line.band[1][at] !== null ? `, ${line.band[0]}: ${said(line.band[1][at])} to ${said(line.band[2][at])}` : "";
      const name = all.runs.length > 1 ? ` of ${all.runs[line.run].name}` : "";
      return `${line.words}${name} ${said(line.values[at])}${mean}${band}`;
    }).join(" · ") || "nothing recorded",
    last() {
      const there = all.steps.length - 1;
      host.ariaLabel = `${plot.title}: steps ${all.steps[0]} to ${all.steps[there]}; arrow keys move along steps, Enter opens a step's samples, plus and minus zoom`;
      self.show(there, true);
    },
    take: (found) => { plot = found; },
    end: () => { drawn.destroy(); drawn = null; },
    title: plot.title,
  };
  return self;
}

function render({ model, el }) {
  const below = overStatic(el, model.get("alone") === true ? ":not(*)" : ".workbench-static, img");
  const problem = make("span", { class: "wb-problem", role: "alert" });
  const talk = talker(model, problem, below);
  const readout = make("div", { class: "wb-readout", role: "status" });
  const bar = make("div", { class: "wb-bar" });
  const grid = make("div", { class: "wb-plots" });
  const notes = make("ol", { class: "wb-marks" });
  const flat = make("div", { class: "wb-flat" });
  const code = make("code", { class: "wb-code" });
  const cards = make("div", { class: "wb-samples-below" });
  const root = make("div", { class: "wb wb-curves" }, bar, readout, grid, flat, notes, make("div", {}, problem, code), cards);
  el.append(root);
  const look = { smooth: 0, log: false, picked: [], pointed: null, ink: inks(root) };
  let all = null, plots = [], at = 0, span = [], opened = 0, keys = [], kind = "", loads = 0;

  const read = (plot) => { readout.textContent = `step ${all.steps[at]} · ${plot.title}: ${plot.text(at)}`; };
  const on = {
    cursor(plot, index) {
      at = index;
      plots.forEach((one) => one.show(at, one === plot));
      read(plot);
    },
    zoom(from, to) {
      // an axis of one step is wider than it: what is beyond the steps is no zoom, or the curves would not follow new steps
      const min = Math.max(from, all.steps[0]), max = Math.min(to, all.steps[all.steps.length - 1]);
      if (span[0] === min && span[1] === max) return;
      span = [min, max];
      plots.forEach((one) => one.zoom(min, max));
      requestAnimationFrame(() => plots.forEach((one) => one.show(at, one === look.pointed)));
    },
    async open(run, index) {
      const asked = ++opened, step = all.steps[index];
      problem.textContent = "";
      try {
        const found = await talk.ask({ kind: "samples", run: all.runs[run].place, step });
        if (asked !== opened) return;
        code.textContent = found.code;
        fromViews(cards, found.html);
      } catch (text) {
        if (asked !== opened) return;
        code.textContent = "";
        cards.replaceChildren();
        problem.textContent = text;
      }
    },
  };
  const whole = () => on.zoom(all.steps[0], all.steps[all.steps.length - 1]);

  function pressed(event, plot) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const inside = all.steps.map((step, index) => [step, index]).filter(([step]) => step >= span[0] && step <= span[1]);
      const first = inside[0][1], last = inside[inside.length - 1][1];
      at = Math.min(Math.max(at + moves[event.key], first), last);
      plots.forEach((one) => one.show(at));
      read(plot);
    } else if (event.key === "Enter") on.open(plot.nearest(at, HEIGHT / 2), at);
    else if (event.key === "+" || event.key === "=") plot.zoomed(0.7, all.steps[at]);
    else if (event.key === "-") plot.zoomed(1 / 0.7, all.steps[at]);
    else if (event.key === "0") whole();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function rebuild() {
    const [min, max] = span;
    plots.forEach((one) => one.build());
    plots.forEach((one) => { one.zoom(min, max); one.show(at, true); });
  }

  function controls() {
    const strength = make("span", { class: "wb-count" }, String(look.smooth));
    // as a share of the slider, so that long memories have room: 0, 0.9, 0.99, 0.999
    const slider = make("input", { type: "range", min: "0", max: "3", step: "0.05", title: "weight of the past in the running mean",
      ariaLabel: "smoothing", value: String(-Math.log10(1 - look.smooth)),
      oninput: () => {
        look.smooth = Number((1 - 10 ** -Number(slider.value)).toFixed(3));
        strength.textContent = String(look.smooth);
        rebuild();
      } });
    const log = make("input", { type: "checkbox", title: "logarithmic scale: values of 0 and below are not drawn",
      onchange: () => { look.log = log.checked; rebuild(); } });
    // the runs that can be drawn, those that are come first; a run keeps its colour
    const drawn = new Set(all.runs.map((run) => run.place));
    const box = (run, place) => make("label", {}, make("input", { type: "checkbox", value: String(place), checked: drawn.has(place), title: "draw this run", onchange: (event) => {
      const picked = [...root.querySelectorAll(".wb-pick input:checked")];
      if (!picked.length) { event.target.checked = true; return; }  // one is drawn at least
      look.picked = picked.map((one) => all.names[Number(one.value)]);
      load();
    } }), swatch(look.ink.line(run.colour)), run.name);
    const boxes = all.known.map(box);
    const rest = boxes.filter((_, place) => !drawn.has(place));
    const more = rest.length && make("details", {}, make("summary", {}, `${rest.length} more ${rest.length === 1 ? "run" : "runs"}`), rest);
    const runs = all.known.length < 2 ? [] : [make("div", { class: "wb-pick", role: "group", ariaLabel: "runs to draw" }, boxes.filter((_, place) => drawn.has(place)), more || null)];
    const chosen = make("input", { type: "search", size: 24, placeholder: "metrics: KL, critic/*", ariaLabel: "metrics to draw",
      title: "titles, metrics and patterns, separated by commas; empty: the main metrics",
      onchange: () => { keys = chosen.value.split(",").map((one) => one.trim()).filter(Boolean); load(); } });
    bar.append(...runs, chosen, make("label", {}, "smoothing ", slider, strength), make("label", {}, log, "log scale"),
      make("button", { onclick: whole, title: "show all steps" }, "all steps"),
      make("span", { class: "wb-count", title: "The mouse wheel zooms with Ctrl, or over the plot that was clicked last. Arrow keys, Enter, + and − act on that plot." },
        "Drag to zoom. Click a step that has a tick on the axis to see its samples."));
  }

  const theme = () => {
    look.ink = inks(root);
    rebuild();
  };
  const watch = new MutationObserver(theme);
  const sizes = new ResizeObserver(() => { columns(); plots.forEach((one) => one.size()); });

  // as many columns as fit, rows of about the same number of plots: five are three and two, not four and one
  function columns() {
    const most = Math.min(Math.max(Math.floor((grid.clientWidth + 16) / 316), 1), 4);
    grid.style.gridTemplateColumns = `repeat(${Math.ceil(plots.length / Math.ceil(plots.length / most)) || 1}, minmax(0, 1fr))`;
  }

  // All that is drawn, at first and whenever the curves went on or other ones are wanted: what was zoomed, hidden, smoothed stays.
  async function load() {
    const mine = ++loads;
    try {
      const found = await talk.ask({ kind: "columns", keys, names: look.picked });
      if (mine !== loads) return;
      problem.textContent = "";
      take(found);
    } catch (text) {
      if (mine === loads) problem.textContent = text;
    }
  }

  function take(found) {
    const first = all === null || !all.steps.length;
    const last = first ? 0 : all.steps.length - 1;
    const whole = first || (span[0] === all.steps[0] && span[1] === all.steps[last]);
    const end = at === last;
    if (first) look.smooth = found.smooth;
    all = Object.assign(all || {}, found, { plots: found.plots });
    if (!all.steps.length) { readout.textContent = "no step yet"; return; }
    look.ink = inks(root);
    if (end || at >= all.steps.length) at = all.steps.length - 1;
    if (whole) span = [all.steps[0], all.steps[all.steps.length - 1]];
    if (first) controls();
    const still = all.chosen || all.plots.every(isFlat) ? [] : all.plots.filter(isFlat);
    flat.textContent = still.length ? `the same at all steps: ${still.map((plot) => `${plot.title} ${said(plot.lines[0].values.find((one) => one !== null))}`).join(" · ")}` : "";
    all.plots = all.plots.filter((plot) => !still.includes(plot));
    const now = JSON.stringify(all.plots.map((plot) => [plot.title, plot.lines.map((line) => [line.words, line.run])]));
    if (now !== kind) {
      plots.forEach((one) => one.end());
      plots = all.plots.map((plot) => plotted(plot, all, look, on));
      plots.forEach((one) => one.host.addEventListener("keydown", (event) => pressed(event, one)));
      grid.replaceChildren(...plots.map((one) => one.node));
      columns();
    } else plots.forEach((one, number) => one.take(all.plots[number]));
    kind = now;
    rebuild();
    plots.forEach((one) => one.last());
    plots.forEach((one) => one.show(at, true));
    if (plots.length) read(look.pointed || plots[0]);
    // a symptom stands under the curve of its metric, or under all
    const note = (mark) => {
      const [head, ...rest] = mark.text.split(": ");  // one line each, so that the plots of a row end together
      return make("li", { value: all.marks.indexOf(mark) + 1 }, make("details", {}, make("summary", {}, head), make("div", {}, rest.join(": "))));
    };
    const under = (mark) => all.plots.findIndex((plot) => draws(plot, mark));
    plots.forEach((one, number) => one.notes.replaceChildren(...all.marks.filter((mark) => under(mark) === number).map(note)));
    notes.replaceChildren(...all.marks.filter((mark) => under(mark) < 0).map(note));
    if (!first) return;
    sizes.observe(grid);
    watch.observe(document.body, { attributes: true });
    below.hide();
  }
  model.on("change:version", load);
  load();
  return () => { model.off("change:version", load); sizes.disconnect(); watch.disconnect(); talk.end(); below.restore(); };
}
export default { render };
