(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const PRUNED = -1;
  const byId = (id) => document.getElementById(id);

  // --- light and dark: the system's choice until somebody makes another ---
  const root = document.documentElement;
  const theme = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => {
    try { return localStorage.getItem("diffrate-theme"); } catch { return null; } // files may have no storage
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const say = () => theme.setAttribute("aria-pressed", String(isDark()));
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("diffrate-theme", root.dataset.theme); } catch { /* then only for now */ }
    say();
  });
  system.addEventListener("change", say);
  say();

  // --- the token explorer ---
  const source = byId("pictures");
  if (!source) return;
  const pictures = JSON.parse(source.textContent);
  const numbers = (words) => words.split(" ").filter(Boolean).map(Number);
  for (const each of pictures) {
    each.blocks = each.blocks.map((block) => ({ tokens: numbers(block.tokens), mass: numbers(block.mass) }));
  }
  const [stage, slider, where, play, patchInfo, life, answers] =
    ["stage", "block", "where", "play", "patch", "life", "answers"].map(byId);
  const choices = [...document.querySelectorAll('input[name="picture"]')];

  let picture = pictures[0];
  let cells = []; // one <rect> a patch
  let layers = {}; // what lies above the image
  let hovered = null;
  let held = null; // the patch that was clicked or has the focus

  const make = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent?.append(element);
    return element;
  };
  const text = (name, words, parent, style) => {
    const element = document.createElement(name);
    element.textContent = words;
    if (style) element.className = style;
    parent.append(element);
    return element;
  };
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : word.endsWith("h") ? "es" : "s"}`;
  const percent = (share) => `${Math.round(100 * share)} %`;

  const block = () => Math.min(Number(slider.value), picture.blocks.length);
  // The token of a patch after a block; before the first block every patch is its own token.
  const tokenAt = (b, patch) => (b === 0 ? patch : picture.blocks[b - 1].tokens[patch]);
  const membersAt = (b, patch) => {
    if (b === 0) return [patch];
    const tokens = picture.blocks[b - 1].tokens;
    const token = tokens[patch];
    return tokens.flatMap((t, i) => (t === token ? [i] : []));
  };
  const colourOf = (patch) =>
    [0, 2, 4].map((at) => parseInt(picture.colours.slice(6 * patch + at, 6 * patch + at + 2), 16));

  const box = (patch) => {
    const [rows, columns] = picture.grid;
    const [height, width] = picture.size;
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    return { x: column * width / columns, y: row * height / rows, w: width / columns, h: height / rows, row, column };
  };

  // Lines between neighbours that `differ`; with `outer` also along the image's own edge.
  const outline = (differ, outer) => {
    const [rows, columns] = picture.grid;
    const lines = [];
    for (let patch = 0; patch < rows * columns; patch++) {
      const { x, y, w, h, row, column } = box(patch);
      if (row > 0 ? differ(patch, patch - columns) : outer?.(patch)) lines.push(`M${x} ${y}h${w}`);
      if (column > 0 ? differ(patch, patch - 1) : outer?.(patch)) lines.push(`M${x} ${y}v${h}`);
      if (outer?.(patch) && row === rows - 1) lines.push(`M${x} ${y + h}h${w}`);
      if (outer?.(patch) && column === columns - 1) lines.push(`M${x + w} ${y}v${h}`);
    }
    return lines.join("");
  };

  const build = () => {
    const [height, width] = picture.size;
    const [rows, columns] = picture.grid;
    stage.replaceChildren();
    stage.setAttribute("viewBox", `0 0 ${width} ${height}`);
    stage.setAttribute("aria-rowcount", rows);
    stage.setAttribute("aria-colcount", columns);
    stage.classList.toggle("coarse", Math.max(height, width) < 200);
    make("image", { href: choices[pictures.indexOf(picture)].nextElementSibling.src, width, height, "aria-hidden": "true" }, stage);
    cells = [];
    for (let row = 0; row < rows; row++) {
      const group = make("g", { role: "row" }, stage);
      for (let column = 0; column < columns; column++) {
        const patch = row * columns + column;
        const { x, y, w, h } = box(patch);
        // A hair wider than the patch, so that no gap shows between neighbours of one colour.
        const at = { x, y, width: w + 0.02 * w, height: h + 0.02 * h };
        cells.push(make("rect", { ...at, class: "cell", role: "gridcell", tabindex: -1, "data-patch": patch }, group));
      }
    }
    layers = {};
    for (const name of ["borders", "shade", "picked"]) layers[name] = make("path", { class: name }, stage);
    layers.shade.setAttribute("fill-rule", "evenodd");
    layers.cursor = make("rect", { class: "cursor" }, stage);
    answers.replaceChildren();
    const rowsOf = [["label", picture.label, ""]];
    for (const [name, answer] of [["uncompressed", picture.before], ["compressed", picture.after]]) {
      rowsOf.push([name, `${answer.class} ${percent(answer.share)}`, answer.correct ? "right" : "wrong"]);
    }
    for (const [name, words, style] of rowsOf) {
      text("dt", name, answers);
      text("dd", words, answers, style);
    }
    slider.max = picture.blocks.length;
    hovered = held = null;
    cells[0].setAttribute("tabindex", 0);
    paint();
  };

  const paint = () => {
    const b = block();
    const total = cells.length;
    const groups = new Map();
    for (let patch = 0; patch < total; patch++) {
      const token = tokenAt(b, patch);
      if (!groups.has(token)) groups.set(token, []);
      groups.get(token).push(patch);
    }
    for (const [token, members] of groups) {
      let fill = "transparent";
      if (token === PRUNED) fill = "#000";
      else if (members.length > 1) {
        const sums = [0, 0, 0];
        for (const patch of members) colourOf(patch).forEach((value, i) => { sums[i] += value; });
        fill = `rgb(${sums.map((value) => Math.round(value / members.length)).join(" ")})`;
      }
      for (const patch of members) {
        const cell = cells[patch];
        cell.style.fill = fill;
        cell.dataset.token = token;
        cell.setAttribute("aria-label", sentence(b, patch, members.length));
      }
    }
    layers.borders.setAttribute("d", b === 0 ? "" : outline((p, q) => tokenAt(b, p) !== tokenAt(b, q)));
    const left = [...groups.keys()].filter((token) => token !== PRUNED).length;
    where.textContent = b === 0 ? `the image: ${total} patches` : `${b} of ${picture.blocks.length}: ${left} of ${total} tokens`;
    slider.setAttribute("aria-valuetext", b === 0 ? "the image itself" : `block ${b}, ${left} of ${total} tokens left`);
    pick();
  };

  const sentence = (b, patch, count) => {
    const { row, column } = box(patch);
    const place = `row ${row + 1}, column ${column + 1}`;
    if (tokenAt(b, patch) === PRUNED) return `${place}: pruned`;
    return count > 1 ? `${place}: merged, token of ${count} patches` : `${place}: a token of its own`;
  };

  // The patch that is pointed at, else the one that is held, and all that share its token.
  const pick = () => {
    const patch = hovered ?? held;
    layers.cursor.classList.toggle("on", held !== null);
    if (held !== null) {
      const { x, y, w, h } = box(held);
      for (const [key, value] of Object.entries({ x, y, width: w, height: h })) layers.cursor.setAttribute(key, value);
    }
    patchInfo.replaceChildren();
    life.replaceChildren();
    if (patch === null) {
      layers.shade.setAttribute("d", "");
      layers.picked.setAttribute("d", "");
      text("strong", "No patch chosen", patchInfo);
      text("p", "Point at one to see what it became.", patchInfo);
      return;
    }
    const b = block();
    const pruned = tokenAt(b, patch) === PRUNED;
    const members = pruned ? [patch] : membersAt(b, patch);
    const inside = new Set(members);
    const [height, width] = picture.size;
    const holes = members.map((p) => { const { x, y, w, h } = box(p); return `M${x} ${y}h${w}v${h}h${-w}z`; });
    layers.shade.setAttribute("d", `M0 0h${width}v${height}h${-width}z${holes.join("")}`);
    layers.picked.setAttribute("d", outline((p, q) => inside.has(p) !== inside.has(q), (p) => inside.has(p)));

    const { row, column } = box(patch);
    const mass = b === 0 ? 1 : picture.blocks[b - 1].mass[tokenAt(b, patch)];
    const gone = picture.blocks.findIndex((each) => each.tokens[patch] === PRUNED) + 1;
    text("strong", pruned ? `Pruned in block ${gone}` : `Token of ${plural(members.length, "patch")}, mass ${mass.toFixed(2)}`, patchInfo);
    text("p", `Patch in row ${row + 1}, column ${column + 1}`, patchInfo);
    const joined = picture.blocks.findIndex((_, i) => membersAt(i + 1, patch).length > 1 && tokenAt(i + 1, patch) !== PRUNED) + 1;
    if (!pruned) text("p", joined && joined <= b ? `Merged since block ${joined}` : "On its own so far", patchInfo);
    drawLife(patch, b);
  };

  // How many patches the patch's token has after each block.
  const drawLife = (patch, now) => {
    const sizes = picture.blocks.map((_, i) => (tokenAt(i + 1, patch) === PRUNED ? 0 : membersAt(i + 1, patch).length));
    const most = Math.max(...sizes, 1);
    const [tall, wide] = [54, 240 / sizes.length];
    text("p", "Patches in its token, block by block (×: pruned)", life);
    const svg = make("svg", { viewBox: `0 0 240 ${tall + 24}`, "aria-hidden": "true" }, life);
    sizes.forEach((size, i) => {
      const high = size ? Math.max(2, (size / most) * tall) : 0;
      make("rect", { x: i * wide + 1, y: 12 + tall - high, width: Math.max(1, wide - 2), height: high, class: i + 1 === now ? "now" : "" }, svg);
      if (wide < 12 && i + 1 !== now) return;
      const middle = { x: (i + 0.5) * wide, "text-anchor": "middle" };
      make("text", { ...middle, y: 9 + tall - high }, svg).textContent = size || "×";
      make("text", { ...middle, y: tall + 22 }, svg).textContent = i + 1;
    });
  };

  const patchOf = (event) => (event.target.dataset?.patch === undefined ? null : Number(event.target.dataset.patch));
  stage.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return;
    hovered = patchOf(event);
    pick();
  });
  stage.addEventListener("pointerleave", () => { hovered = null; pick(); });
  stage.addEventListener("click", (event) => { const patch = patchOf(event); if (patch !== null) hold(patch); });
  // On the parent: an <svg> that listens for focus becomes a stop of the tab key itself.
  stage.parentElement.addEventListener("focusin", (event) => {
    const patch = patchOf(event);
    if (patch !== null && patch !== held) { held = patch; pick(); }
  });
  const hold = (patch) => {
    for (const cell of cells) if (cell.tabIndex === 0) cell.setAttribute("tabindex", -1);
    cells[patch].setAttribute("tabindex", 0);
    hovered = null;
    held = patch;
    cells[patch].focus({ preventScroll: true });
    pick();
  };
  stage.addEventListener("keydown", (event) => {
    const [rows, columns] = picture.grid;
    const now = held ?? 0;
    const [row, column] = [Math.floor(now / columns), now % columns];
    const moves = {
      ArrowLeft: [row, Math.max(0, column - 1)], ArrowRight: [row, Math.min(columns - 1, column + 1)],
      ArrowUp: [Math.max(0, row - 1), column], ArrowDown: [Math.min(rows - 1, row + 1), column],
      Home: [row, 0], End: [row, columns - 1],
    };
    if (event.key === "Escape") { held = hovered = null; pick(); return; }
    const to = moves[event.key];
    if (!to) return;
    event.preventDefault();
    hold(to[0] * columns + to[1]);
  });

  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
  play.addEventListener("click", () => {
    if (timer !== null) { stop(); return; }
    play.textContent = "Pause";
    if (block() === picture.blocks.length) slider.value = 0;
    paint();
    timer = setInterval(() => {
      slider.value = block() + 1;
      paint();
      if (block() === picture.blocks.length) stop();
    }, 600);
  });
  slider.addEventListener("input", () => { if (timer !== null) stop(); paint(); });
  const show = (index) => { stop(); picture = pictures[index]; build(); };
  for (const choice of choices) choice.addEventListener("change", () => show(Number(choice.value)));
  for (const button of document.querySelectorAll("button[data-picture]")) {
    button.addEventListener("click", () => {
      const choice = choices[Number(button.dataset.picture)];
      choice.checked = true;
      show(Number(choice.value));
      byId("explore").scrollIntoView();
      choice.focus({ preventScroll: true });
    });
  }
  // A browser may restore these after a reload.
  show(Math.max(0, choices.findIndex((choice) => choice.checked)));
})();
