// The player around a view {svg(i), tip(target, i, root), say(i)}: slider, play, step, keyboard, hover.
for (const root of document.querySelectorAll(`[data-te="${P.id}"]:not([data-on])`)) {
  root.dataset.on = 1;
  const V = view(P, root), N = P.num, old = root.querySelector('img');
  const make = (tag, set, style) => {
    const e = Object.assign(document.createElement(tag), set);
    e.style.cssText = style || '';
    return e;
  };
  const bar = make('div', {}, 'display:flex;gap:6px;align-items:center;max-width:860px;margin:4px 0');
  const button = (label, sign) => {
    const e = make('button', {type: 'button', textContent: sign, title: label},
      'min-width:34px;font-size:15px;line-height:22px;cursor:pointer');
    e.setAttribute('aria-label', label); bar.append(e);
    return e;
  };
  const first = button('first step', '|◀'), back = button('one step back', '◀'), play = button('play', '▶');
  const next = button('one step on', '▶|'), slider = make('input', {type: 'range', min: 0, max: N - 1},
    'flex:1;min-width:80px');
  slider.setAttribute('aria-label', 'step');
  const where = make('span', {}, 'font:12px monospace;white-space:nowrap'); bar.append(slider, where);
  const box = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  for (const [k, v] of Object.entries({class: 'te', viewBox: `0 0 ${P.w} ${P.h}`, role: 'img', style:
    `width:100%;max-width:${P.w}px;display:block`})) box.setAttribute(k, v);
  const note = make('div', {}, 'font:12px sans-serif;min-height:18px;padding:2px 4px');
  old.replaceWith(bar, box, note);
  let at = P.at, timer = 0, over = null;
  const show = i => {
    at = Math.max(0, Math.min(N - 1, i));
    box.innerHTML = P.hatch + `<rect class="bg" width="${P.w}" height="${P.h}" rx="8"/>` + V.svg(at);
    const words = V.say(at);
    box.setAttribute('aria-label', words); slider.setAttribute('aria-valuetext', words);
    slider.value = at; where.textContent = `${at + 1}/${N}`;
    note.textContent = over ? V.tip(over, at, root) : P.hint;
  };
  const stop = () => { clearInterval(timer); timer = 0; play.textContent = '▶'; play.setAttribute('aria-label', 'play'); };
  const go = i => { stop(); show(i); };
  const toggle = () => {
    if (timer) return stop();
    if (at === N - 1) show(0);
    play.textContent = '||'; play.setAttribute('aria-label', 'pause');
    timer = setInterval(() => { show(at + 1); if (at === N - 1 || !root.isConnected) stop(); }, P.ms);
  };
  first.onclick = () => go(0); back.onclick = () => go(at - 1); next.onclick = () => go(at + 1);
  play.onclick = toggle; slider.oninput = () => go(+slider.value);
  root.onkeydown = e => {
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1, PageDown: at - 10,
      PageUp: at + 10, Home: 0, End: N - 1}[e.key];
    if (to !== undefined) go(to);
    else if (e.key === ' ' && e.target.tagName !== 'BUTTON') toggle();  // a button presses itself
    else return;
    e.preventDefault(); e.stopPropagation();
  };
  box.onpointermove = e => {
    const words = V.tip(e.target, at, root);
    over = words ? e.target : null;
    note.textContent = words || P.hint;
  };
  box.onpointerleave = () => { over = null; V.tip(box, at, root); note.textContent = P.hint; };
  show(at);
}
