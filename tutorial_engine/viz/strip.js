// A drawing of the whole trace, step by step from left to right: frame i covers what comes after its step.
const view = (P, root) => {
  const bytes = Uint8Array.from(atob(root.querySelector('img').src.split(',')[1]), c => c.charCodeAt(0));
  const all = new TextDecoder().decode(bytes), body = all.slice(all.indexOf('rx="8"/>') + 8, -6);
  const words = ([forms, rows], k) => {
    let n = 1;
    return forms[rows[k][0]].replace(/\u0001/g, () => rows[k][n++]);
  };
  const end = P.xs[P.xs.length - 1];
  return {
    svg: i => body + `<rect x="${P.xs[i + 1]}" y="${P.y0}" width="${end - P.xs[i + 1] + 1}" height="${
      P.y1 - P.y0}" class="bg" opacity=".8"/><rect class="k" x="${P.xs[i]}" y="${P.y0}" width="${
      Math.max(P.xs[i + 1] - P.xs[i], 1)}" height="${P.y1 - P.y0}"/>`,
    say: i => words(P.say, i),
    tip: (target, i) => {
      const k = [...(target.closest('svg')?.querySelectorAll('.r') || [])].indexOf(target);
      return k < 0 ? words(P.say, i) : words(P.tips, k);
    },
  };
};
