"""What a drawn screen is made of, and what is wrong with it: scripts for a page, used by tests and by `make pictures`."""

from __future__ import annotations

WIDTHS = (360, 900, 1600)
"""A telephone, a notebook beside its files, a wide window: pixels."""

OUTLINE = """(within) => {
  const lines = [], near = (value) => Math.round(value / 8) * 8;
  const walk = (box, depth) => {
    if (!box.checkVisibility({ visibilityProperty: true }) || box.tagName === "I") return;  // an `i` is a bar: as long as a number
    const own = [...box.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data).join(" ").trim();
    const names = [...box.classList].filter((one) => one.startsWith("wb") && one !== "wb-under").slice(0, 2).join(".");
    const shown = names || (own && !box.closest(".wb-tokens, tbody tr:nth-child(n + 4)"));
    if (shown) {
      const { left, top, width, height } = box.getBoundingClientRect();
      const words = own.replace(/\\/\\S+\\//, "/").replace(/-?\\d+(\\.\\d+)?(e-?\\d+)?/g, "0").replace(/\\s+/g, " ").slice(0, 32);
      lines.push(`${" ".repeat(depth)}${box.tagName.toLowerCase()}${names && "." + names} ${near(left)},${near(top)} ${near(width)}x${near(height)} ${words}`.trimEnd());
    }
    for (const one of box.children) walk(one, depth + (shown ? 1 : 0));
  };
  walk(document.querySelector(within), 0);
  return lines.slice(0, 48);
}"""
"""One line for each visible box with a class of ours or a text: place and size in steps of 8 pixels, numbers as 0."""

FAULTS = """(within) => {
  const found = new Set(), page = document.documentElement.clientWidth, root = document.querySelector(within);
  if (document.documentElement.scrollWidth > page) found.add(`the page is ${document.documentElement.scrollWidth} wide`);
  const named = (box) => `${box.tagName.toLowerCase()}.${box.className} "${(box.innerText || box.value || "").slice(0, 32)}"`;
  const scrolls = (box) => { for (let one = box; one; one = one === root ? null : one.parentElement) if (/auto|scroll/.test(getComputedStyle(one).overflowX)) return true; return false; };
  const texts = [];
  for (const box of root.querySelectorAll("*")) {
    if (!box.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(box), own = [...box.childNodes].filter((one) => one.nodeType === 3 && one.data.trim());
    if (/hidden|clip/.test(style.overflowX) && box.scrollWidth > box.clientWidth + 1 && style.textOverflow !== "ellipsis" && box.innerText?.trim()) found.add(`cut: ${named(box)}`);
    if (!own.length) continue;
    if (parseFloat(style.fontSize) < 10.8 && !box.closest("math")) found.add(`text of ${style.fontSize}: ${named(box)}`);
    const range = document.createRange();
    for (const one of own) {
      range.selectNodeContents(one);
      for (const { left, right, top, bottom } of range.getClientRects()) {
        if (right > page + 1 && style.overflowX !== "hidden" && !scrolls(box)) found.add(`beyond the page: ${named(box)}`);
        const inside = style.overflowX === "hidden" ? box.getBoundingClientRect() : { right: Infinity, bottom: Infinity };
        if (right - left > 2) texts.push([left, Math.min(right, inside.right), top + 2, Math.min(bottom - 2, inside.bottom), box]);
      }
    }
  }
  // a text that lies over another one; what is scrolled away or lies in a layer above (a menu, a mark) does not count
  const layer = (box) => box.closest(".wb-mark, .wb-columns > div, th, .wb-scroll, .wb-tokens, .wb-detail, [style*='overflow']");
  for (let one = 0; one < texts.length; one += 1) {
    for (let two = one + 1; two < Math.min(texts.length, one + 60); two += 1) {
      const [a, b] = [texts[one], texts[two]];
      if (a[4] === b[4] || layer(a[4]) || layer(b[4])) continue;
      if (a[0] + 1 < b[1] && b[0] + 1 < a[1] && a[2] < b[3] && b[2] < a[3]) found.add(`covered: ${named(a[4])} by ${named(b[4])}`);
    }
  }
  return [...found];
}"""
"""Texts that are cut without an ellipsis, beyond the page, smaller than 11 pixels, or over each other."""
