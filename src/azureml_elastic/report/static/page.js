"use strict";
(() => {
  const root = document.documentElement;

  // Colours: those of the system until the button was used.
  const theme = document.getElementById("theme");
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("azureml-elastic-theme"); } catch { return null; } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);
  const showTheme = () => { // the button has the name of what it changes to
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `${theme.textContent} colours`);
  };
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("azureml-elastic-theme", root.dataset.theme); } catch { /* a page without storage */ }
    showTheme();
  });
  systemDark.addEventListener("change", showTheme);
  showTheme();

  // Cursors: each chart, or each line of one, can be read point by point with the arrow keys or the pointer.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true"); // assistive technology reads the cursor's value
  document.body.append(tip);

  function describe(names, row) {
    const cells = [...row.cells].map((cell) => cell.textContent);
    return names.map((name, index) => [name, cells[index]]).filter(([, value]) => value);
  }

  function showTip(cursor, hair, pairs) {
    const list = document.createElement("dl");
    for (const [name, value] of pairs) {
      const term = document.createElement("dt");
      const definition = document.createElement("dd");
      term.textContent = name;
      definition.textContent = value;
      list.append(term, definition);
    }
    tip.replaceChildren(list);
    tip.hidden = false;
    const at = hair.getBoundingClientRect();
    const middle = at.left + at.width / 2 - tip.offsetWidth / 2;
    const left = Math.min(Math.max(8, middle), root.clientWidth - tip.offsetWidth - 8);
    const above = at.top - tip.offsetHeight - 8;
    const top = above > 0 ? above : at.bottom + 8;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${top + scrollY}px`;
  }

  function addCursor(plot, names, rows, label, key) {
    if (!rows.length) return null;
    const cursor = document.createElement("div");
    const hair = document.createElement("div");
    cursor.className = "cursor";
    hair.className = "hair";
    hair.hidden = true;
    cursor.append(hair);
    cursor.tabIndex = 0;
    cursor.dataset.key = key;
    cursor.dataset.index = "0";
    const attributes = { role: "slider", "aria-label": label, "aria-valuemin": 1, "aria-valuemax": rows.length };
    for (const [name, value] of Object.entries(attributes)) cursor.setAttribute(name, value);
    const left = (row) => Number(row.dataset.l);
    const right = (row) => Number(row.dataset.r ?? row.dataset.l);

    function select(index, visible) {
      const chosen = Math.min(rows.length - 1, Math.max(0, index));
      const row = rows[chosen];
      const pairs = describe(names, row);
      cursor.dataset.index = String(chosen);
      cursor.setAttribute("aria-valuenow", chosen + 1);
      cursor.setAttribute("aria-valuetext", pairs.map(([name, value]) => `${name} ${value}`).join(", "));
      if (!visible) return;
      hair.hidden = false;
      hair.classList.toggle("span", right(row) > left(row));
      hair.style.left = `${left(row)}%`;
      hair.style.width = `${right(row) - left(row)}%`;
      showTip(cursor, hair, pairs);
    }
    function hide() {
      hair.hidden = true;
      tip.hidden = true;
    }
    function nearest(x) {
      let best = 0;
      let least = Infinity;
      rows.forEach((row, index) => {
        const inside = Math.max(left(row) - x, x - right(row), 0);
        const point = right(row) === left(row);
        // A mark wins over the span below it when the pointer is close.
        const distance = point ? (inside < 0.8 ? inside - 1 : inside) : inside;
        if (distance < least) { least = distance; best = index; }
      });
      return best;
    }
    const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
    cursor.addEventListener("keydown", (event) => {
      const now = Number(cursor.dataset.index);
      if (event.key === "Escape") return hide();
      let next = null;
      if (event.key in moves) next = now + moves[event.key];
      if (event.key === "Home") next = 0;
      if (event.key === "End") next = rows.length - 1;
      if (next === null || event.altKey || event.ctrlKey || event.metaKey) return undefined;
      event.preventDefault();
      return select(next, true);
    });
    cursor.addEventListener("focus", () => select(Number(cursor.dataset.index), cursor.matches(":focus-visible")));
    cursor.addEventListener("blur", hide);
    cursor.addEventListener("pointermove", (event) => {
      const box = cursor.getBoundingClientRect();
      select(nearest(((event.clientX - box.left) / box.width) * 100), true);
    });
    cursor.addEventListener("pointerleave", () => {
      if (document.activeElement !== cursor) hide();
    });
    select(0, false);
    plot.append(cursor);
    return cursor;
  }

  function enhance(scope) {
    for (const figure of scope.querySelectorAll("figure:not([data-labelled])")) {
      const plot = figure.querySelector(".plot");
      const names = [...figure.querySelectorAll("thead th")].map((cell) => cell.textContent);
      const rows = [...figure.querySelectorAll("tbody tr")].sort((a, b) => a.dataset.l - b.dataset.l);
      const title = figure.querySelector("h3").textContent;
      const count = Number(figure.dataset.lines ?? 0);
      if (!count) {
        addCursor(plot, names, rows, title, figure.id);
        continue;
      }
      const lines = Array.from({ length: count }, () => []);
      for (const row of rows) lines[row.dataset.n].push(row);
      lines.forEach((own, line) => {
        if (!own.length) return;
        const name = own[0].cells[0].textContent;
        const cursor = addCursor(plot, names, own, name, `${figure.id} ${name}`);
        const height = Number(figure.dataset.row);
        cursor.style.inset = `${line * height}px 0 auto`;
        cursor.style.height = `${height}px`;
      });
    }
  }
  const source = (page) => new Map([...page.querySelectorAll("[data-part]")].map((part) => [part.id, part.outerHTML]));
  const period = Number(root.dataset.poll ?? 0);
  let shown = period ? source(document) : null;
  enhance(document);

  // Print with all folded messages open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details.folded:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });

  // Update: replace the parts that have changed, and keep position, focus and what is open.
  if (!period) return;
  const live = document.getElementById("live");
  let tag = null;

  function keep(part) {
    const active = part.contains(document.activeElement) ? document.activeElement : null;
    const owner = active?.closest("[id]");
    return {
      open: new Map([...part.querySelectorAll("details[id]")].map((each) => [each.id, each.open])),
      scrolled: [...part.querySelectorAll(".scroll, pre")].map((each) => [each.scrollLeft, each.scrollTop]),
      cursors: new Map([...part.querySelectorAll(".cursor")].map((each) => [each.dataset.key, each.dataset.index])),
      key: active?.dataset.key,
      focus: active && !active.dataset.key ? [owner?.id, active.tagName, active.getAttribute("href")] : null,
    };
  }

  function bring(part, kept) {
    for (const each of part.querySelectorAll("details[id]")) if (kept.open.get(each.id)) each.open = true;
    part.querySelectorAll(".scroll, pre").forEach((each, index) => {
      if (kept.scrolled[index]) [each.scrollLeft, each.scrollTop] = kept.scrolled[index];
    });
    for (const cursor of part.querySelectorAll(".cursor")) {
      if (kept.cursors.has(cursor.dataset.key)) cursor.dataset.index = kept.cursors.get(cursor.dataset.key);
      if (kept.key === cursor.dataset.key) cursor.focus({ preventScroll: true });
    }
    if (!kept.focus) return;
    const [id, name, target] = kept.focus;
    const owner = id && document.getElementById(id);
    const same = (each) => each.tagName === name && each.getAttribute("href") === target;
    const found = owner && (same(owner) ? owner : [...owner.querySelectorAll(name)].find(same));
    found?.focus({ preventScroll: true });
  }

  function replace(page) {
    const parts = [...page.querySelectorAll("[data-part]")];
    const shownNow = [...document.querySelectorAll("[data-part]")];
    const anchor = shownNow.find((each) => each.getBoundingClientRect().bottom > innerHeight / 4);
    const before = anchor && { id: anchor.id, top: anchor.getBoundingClientRect().top };
    const now = source(page);
    const main = document.getElementById("main");
    for (const id of shown.keys()) if (!now.has(id)) document.getElementById(id)?.remove();
    let previous = null;
    for (const part of parts) {
      const old = document.getElementById(part.id);
      const inMain = part.parentElement.id === "main";
      if (!old || now.get(part.id) !== shown.get(part.id)) {
        const made = document.importNode(part, true);
        const kept = old && keep(old);
        if (old) old.replaceWith(made);
        else if (previous) previous.after(made);
        else main.prepend(made);
        enhance(made);
        if (kept) bring(made, kept);
        if (inMain) previous = made;
      } else if (inMain) previous = old;
    }
    shown = now;
    document.title = page.title;
    const after = before && document.getElementById(before.id);
    if (after) scrollBy({ top: after.getBoundingClientRect().top - before.top, behavior: "instant" });
  }

  async function update() {
    const answer = await fetch(location.href, {
      cache: "no-store",
      credentials: "omit",
      headers: tag ? { "If-None-Match": tag } : {},
    });
    if (answer.status === 304) return true;
    if (!answer.ok) throw new Error(`the dashboard answers with ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    tag = answer.headers.get("ETag");
    replace(page);
    return "poll" in page.documentElement.dataset;
  }

  function show(text, lost) {
    if (live.textContent === text) return;
    live.textContent = text;
    live.classList.toggle("lost", lost);
    live.hidden = false;
  }

  async function poll() {
    let goesOn = true;
    try {
      if (!document.hidden) {
        goesOn = await update();
        show(goesOn ? "Live, updates itself" : "Ended, no further updates", false);
      }
    } catch {
      show("The dashboard does not answer; this is its last state", true);
    }
    if (goesOn) setTimeout(poll, period);
  }
  show("Live, updates itself", false);
  setTimeout(poll, period);
})();
