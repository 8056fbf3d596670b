// Draws the block table of frame i from what changed in the frames before: the twin of `_svg` in block_table.py.
const view = P => {
  const esc = s => String(s).replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const num = n => n.toLocaleString('en-US'), plural = n => n === 1 ? '' : 's';
  const text = (x, y, s, c) => `<text class="${c}" x="${x}" y="${y}">${esc(s)}</text>`;
  const state = i => {
    const S = {T: [], L: [], H: new Set(), F: [], W: [], O: {}, N: {}};
    for (const [step, tables, lengths, hashed, free, numFree, say] of P.frames.slice(0, i + 1)) {
      for (const [r, kept, ...more] of tables)
        if (kept < 0) delete S.T[r]; else S.T[r] = (S.T[r] || []).slice(0, kept).concat(more);
      for (let k = 0; k < lengths.length; k += 2) S.L[lengths[k]] = lengths[k + 1];
      for (const b of hashed) S.H.has(b) ? S.H.delete(b) : S.H.add(b);
      if (free.length) S.F = [...free[1], ...S.F.filter(b => !free[0].includes(b)), ...free[2]];
      if (say) S.W = say;
      S.step = step; S.numFree = numFree;
    }
    S.T.forEach((table, r) => table.forEach((b, k) => {
      (S.O[b] = S.O[b] || []).push(r);
      S.N[b] = Math.max(S.N[b] || 0, Math.min(Math.max(S.L[r] - k * P.s, 0), P.s));
    }));
    S.used = Object.keys(S.O).length;
    S.title = `Step ${S.step}: ${num(S.used)} block${plural(S.used)} in use (${
      Object.values(S.O).filter(o => o.length > 1).length} shared), ${num(P.n - 1 - S.used)} free`;
    return S;
  };
  const holder = (S, b) => {
    if (!S.O[b]) return b ? 'free' : 'null';
    const names = S.O[b].map(r => P.r[r]).join('+');
    return names.length <= 4 ? 'req ' + names : names.length <= 8 ? names : S.O[b].length + ' req';
  };
  const fill = (S, b) => !S.O[b] ? (S.F.includes(b) ? 'in line ' + (S.F.indexOf(b) + 1) : '')
    : S.N[b] < P.s ? `${S.N[b]}/${P.s}` : '';
  const open = (S, b, x, y, h) => {
    const rs = (S.O[b] || []).slice(0, 4), hash = S.H.has(b);
    const band = Math.floor(Math.floor(50 * (S.N[b] || 0) / P.s) / Math.max(rs.length, 1));
    return `<g transform="translate(${x},${y})" data-b="${b}"><rect class="${
      rs.length ? 'c' : hash ? 'c d' : b ? 'c l' : 'c z'}" width="52" height="${h}" rx="3"/>` +
      rs.map((r, n) => `<path class="p${r % 6}" d="M${1 + n * band} 1h${band}v${h - 2}h-${band}z"/>`).join('') +
      (hash ? '<text class="b" x="45" y="13">#</text>' : '');
  };
  const svg = i => {
    const S = state(i);
    let out = text(16, 26, S.title, 't') + text(16, 50, `the pool: ${num(P.n)} physical blocks of ${P.s} tokens`, 'h') +
      text(492, 50, 'block tables: logical block → physical block', 'h');
    let y = 62;
    for (const [first, last, drawn] of P.rows) {
      if (drawn) for (let b = first; b <= last; b++) {
        const g = S.O[b] ? '' : ' class="g"', words = fill(S, b);
        out += open(S, b, 16 + (b - first) * 56, y, 52) +
          `<text class="n ${S.O[b] ? 'b' : 'g'}" x="26" y="19">${b}</text><text${g} x="26" y="32">${
            esc(holder(S, b))}</text>` + (words ? `<text${g} x="26" y="44">${words}</text>` : '') + '</g>';
      } else {
        const count = bs => bs.filter(b => first <= b && b <= last).length;
        const used = count(Object.keys(S.O)), hash = count([...S.H]);
        out += text(16, y + 14, `⋮  blocks ${num(first)} to ${num(last)}: ${used ? num(used) + ' in use' : 'free'}` +
          (hash ? ` (${num(hash)} of them #)` : ''), 'h');
      }
      y += drawn ? 56 : 26;
    }
    if (S.F.length || S.used === P.n - 1) out += text(16, y + 14, 'free queue after it: ' + (S.F.slice(0, 10).join(' → ') || 'empty') +
      (S.numFree > 10 ? ' → …' : ''), 'h');
    y = 62;
    for (const r of Object.keys(S.T).slice(0, 8)) {
      const n = S.T[r].length;
      out += `<rect class="p${r % 6}" x="492" y="${y + 1}" width="12" height="12" rx="2"/>` + text(510, y + 12,
        `request ${P.r[r]}: ${num(S.L[r])} tokens in ${num(n)} block${plural(n)}`, 's');
      y += 20;
      const shown = [...S.T[r].keys()].filter(k => n <= 24 || k < 18 || k >= n - 6);  // number 17 is the gap
      shown.forEach((k, place) => {
        const b = S.T[r][k], left = 492 + place % 6 * 56, top = y + Math.floor(place / 6) * 44;
        out += n > 24 && place === 17 ? text(left + 26, top + 24, `${num(n - 23)} more`, 'g')
          : open(S, b, left, top, 40) + `<text x="16" y="12">${k} →</text><text class="n b" x="26" y="32">${b}</text></g>`;
      });
      y += Math.ceil(shown.length / 6) * 44 + 8;
    }
    for (const w of S.W) { out += text(492, y + 12, P.lines[w], 'h'); y += 18; }
    return out + P.foot;
  };
  // What hovering over a block says; all places that show it are marked.
  const tip = (target, i, root) => {
    root.querySelectorAll('.on').forEach(e => e.classList.remove('on'));
    const cell = target.closest('[data-b]');
    if (!cell) return '';
    const b = +cell.dataset.b, S = state(i), o = S.O[b], at = S.F.indexOf(b);
    root.querySelectorAll(`[data-b="${b}"]`).forEach(e => e.classList.add('on'));
    return b === 0 ? 'Block 0: the null block, which nobody owns' : `Block ${b}: ` + (o ? `held by request${
      plural(o.length)} ${o.map(r => `${P.r[r]} (logical ${S.T[r].indexOf(b)})`).join(', ')}; ${S.N[b]} of ${
      P.s} tokens; ref_cnt ${o.length}` : 'free' + (at < 0 ? '' : `, number ${at + 1} in the free queue`)) +
      (S.H.has(b) ? '; can be found by its content' : '; not hashed');
  };
  return {svg, tip, say: i => state(i).title};
};
