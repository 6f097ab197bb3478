// The first part of a widget that is made of several: while its box is seen the static form is not; when its kernel has ended the
// static form is, and the other parts are not.
function render({ model, el }) {
  const below = overStatic(el);
  const box = el.closest(".widget-box") || el.parentElement;
  const lost = (text) => {
    below.lost(text);
    [...box.children].forEach((part) => { if (!part.contains(el)) part.style.display = "none"; });
  };
  const talk = talker(model, null, { ...below, lost });
  const again = () => below.hide();
  model.on("change:renewed", again);  // where a page made it anew it is seen
  requestAnimationFrame(below.hide);
  return () => { model.off("change:renewed", again); talk.end(); below.restore(); };
}
export default { render };
