// Progressive enhancement: every page works without this script. It never turns customer input into markup; the only HTML
// it inserts was rendered and escaped by the server.
//
//   <time datetime="…">             shown in the user's time zone, with the exact time on hover
//   <time data-countdown datetime>  "in 4 min 12 s", counting down; data-over is the text afterwards
//   <time data-ago datetime>        "12 s ago"
//   <… data-live="/address">        while the page is visible, a stream at this address sends its live parts
//   <… data-part="name">            a live part: changed into the part with this name in an update
//   <… data-key="id">               within a live part, the same thing before and after an update
//   <button data-copy="#id">        copies the text of that element; without a selector, of the element before it
//   <input data-utc>                a time that the server reads and writes as UTC, shown in the user's time zone
//   <input list="tenants">          suggests tenants
//   <dialog popover>                opened as a modal dialog; at once if the server rendered it open
//   <form data-confirm="…">         asks for confirmation before submitting, in the dialog #confirm
//   <select data-submit>            submits its form on change; changed with the keyboard, on Enter
//   <input data-all="name">         checks or unchecks all boxes with that name in its form
//   <input data-search="#list">     hides what does not contain its text: [data-item], and [data-group] without items
//   <input data-pattern="a.*">      disables boxes whose data-included-in has this pattern while it is checked
"use strict";

document.documentElement.classList.add("scripted");

const sameDay = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const otherDay = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
const otherYear = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

function formatDuration(seconds) {
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function renderTime(element) {
  const at = new Date(element.dateTime);
  if (Number.isNaN(at.getTime())) return;
  element.title = `${at.toString()}\n${at.toISOString()}`;
  const left = (at - Date.now()) / 1000;
  if ("countdown" in element.dataset) {
    element.textContent = left > 0 ? `in ${formatDuration(left)}` : element.dataset.over || "now";
  } else if ("ago" in element.dataset) {
    element.textContent = `${formatDuration(Math.max(0, -left))} ago`;
  } else {
    const now = new Date();
    const format = at.toDateString() === now.toDateString() ? sameDay : at.getFullYear() === now.getFullYear() ? otherDay : otherYear;
    element.textContent = format.format(at);
  }
}

function renderTimes(root) {
  root.querySelectorAll("time[datetime]").forEach(renderTime);
}

renderTimes(document);
setInterval(() => document.querySelectorAll("time[data-countdown], time[data-ago]").forEach(renderTime), 1000);

// Live parts. While the page is visible, a stream sends the parts again whenever they have changed. A page in the background
// holds no connection: a browser opens only six to a site, and every tab would keep one.
// The server confirms what it has sent every few seconds. After this silence the connection is taken for dead.
const SILENCE_MAX_MS = 15000;
const SLOW_MS = 4000;
const RETRY_MS = 500;
const RETRY_MAX_MS = 10000;

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const event = { name: "message", data: [] };
      for (const line of text.slice(0, end).split("\n")) {
        const [, field, content] = /^(\w*): ?(.*)$/.exec(line) || [];
        if (field === "event") event.name = content;
        if (field === "data") event.data.push(content);
      }
      // Comments only keep the connection open.
      if (event.data.length > 0) yield { name: event.name, data: event.data.join("\n") };
    }
  }
}

const keyOf = (node) => node?.dataset?.key;

function changeInto(node, wanted) {
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (node.nodeValue !== wanted.nodeValue) node.nodeValue = wanted.nodeValue;
    return;
  }
  // Already rendered in the user's time zone.
  if (node.nodeName === "TIME" && node.dateTime === wanted.dateTime) return;
  // What the user has opened or closed stays so.
  const isOwn = (name) => name === "open" && node.nodeName === "DETAILS";
  for (const { name } of [...node.attributes]) {
    if (!wanted.hasAttribute(name) && !isOwn(name)) node.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (node.getAttribute(name) !== value && !isOwn(name)) node.setAttribute(name, value);
  }
  changeChildren(node, wanted);
}

// Nodes that stay are changed and not replaced: they keep the focus, their scroll position and open details.
function changeChildren(parent, wanted) {
  const wantedKeys = new Set([...wanted.children].map(keyOf));
  const keyed = new Map();
  for (const child of [...parent.children].filter(keyOf)) {
    if (wantedKeys.has(keyOf(child))) keyed.set(keyOf(child), child);
    else child.remove();
  }
  let next = parent.firstChild;
  const step = () => { const node = next; next = node.nextSibling; return node; };
  for (const node of [...wanted.childNodes]) {
    const key = keyOf(node);
    while (key && next && !keyOf(next)) step().remove();
    const same = key ? keyed.get(key) : !keyOf(next) && next?.nodeName === node.nodeName ? next : null;
    if (same && same === next) step();
    else parent.insertBefore(same ?? node, next);
    if (same) changeInto(same, node);
  }
  while (next) step().remove();
}

// An update has all live parts of the page, so that no button belongs to an older state than the text beside it.
function update(html) {
  const update = document.createElement("template");
  update.innerHTML = html;
  const focused = document.activeElement;
  for (const part of update.content.children) {
    const shown = document.querySelector(`[data-part="${part.dataset.part}"]`);
    // An empty list has no rows to update.
    if (!shown) continue;
    changeChildren(shown, part);
    renderTimes(shown);
  }
  if (document.activeElement !== focused) {
    (focused.isConnected ? focused : document.querySelector("main")).focus({ preventScroll: true });
  }
}

// Selected text must not change under the user's hand.
function isSelected() {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed
    && [...document.querySelectorAll("[data-part]")].some((part) => selection.containsNode(part, true));
}

function follow(element) {
  const [status, age, signIn] = document.querySelector(".connection").children;
  let connection = null;
  let failures = 0;
  let isOver = false;
  // The latest update, if it is not applied yet, and when what is shown was last confirmed.
  let held = null;
  let confirmed = new Date();

  // An empty text hides the message.
  function say(text) {
    if (status.textContent !== text) status.textContent = text;
    status.parentElement.classList.toggle("notice", text !== "");
    age.hidden = text === "";
    age.lastElementChild.dateTime = confirmed.toISOString();
    renderTimes(age);
  }

  function stop(text) {
    isOver = true;
    say(text);
  }

  function apply() {
    if (held === null) return;
    if (isSelected()) return say("Updates are paused while text is selected.");
    update(held);
    held = null;
    confirmed = new Date();
    say("");
  }

  function receive({ name, data }) {
    failures = 0;
    if (name === "message") {
      held = data;
      apply();
    } else if (name === "unchanged" && held === null) {
      confirmed = new Date();
      say("");
    } else if (name === "signed-out") {
      signIn.hidden = false;
      stop("Your session has ended.");
    }
  }

  // Ends when the stream does, or throws.
  async function read(own, heard) {
    const response = await fetch(element.dataset.live, { signal: own.signal, redirect: "manual" });
    // To the sign-in page.
    if (response.type === "opaqueredirect") return receive({ name: "signed-out" });
    const isTransient = response.status >= 500 || response.status === 429;
    if (!response.ok && !isTransient) return stop("This page is no longer updated. Reload it.");
    if (!response.ok) throw new Error(response.statusText);
    for await (const event of eventsOf(response)) {
      heard();
      receive(event);
    }
  }

  async function connect() {
    const own = connection = new AbortController();
    const slow = setTimeout(() => say("Reconnecting…"), SLOW_MS);
    let silence = setTimeout(() => own.abort(), SILENCE_MAX_MS);
    const heard = () => {
      clearTimeout(slow);
      clearTimeout(silence);
      silence = setTimeout(() => own.abort(), SILENCE_MAX_MS);
    };
    try {
      await read(own, heard);
    } catch {
      if (connection === own) {
        failures += 1;
        say("Reconnecting…");
      }
    }
    clearTimeout(slow);
    clearTimeout(silence);
    if (connection !== own) return;
    connection = null;
    if (!isOver) setTimeout(settle, Math.min(RETRY_MS * 2 ** failures, RETRY_MAX_MS) * (0.5 + Math.random() / 2));
  }

  // Connects a visible page and disconnects any other.
  function settle() {
    if (document.hidden || isOver) {
      const own = connection;
      connection = null;
      own?.abort();
    } else if (!connection) {
      connect();
    }
  }

  document.addEventListener("selectionchange", apply);
  document.addEventListener("visibilitychange", settle);
  settle();
}

const live = document.querySelector("[data-live]");
if (live) follow(live);

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const from = button.dataset.copy ? document.querySelector(button.dataset.copy) : button.previousElementSibling;
  const text = "value" in from ? from.value : from.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard needs a secure context. Select the text instead, so that it can be copied with the keyboard.
    document.getSelection().selectAllChildren(from);
    return;
  }
  const before = [...button.childNodes];
  button.textContent = "Copied";
  setTimeout(() => { button.replaceChildren(...before); }, 1500);
});

// The search box lists results while someone types. Arrow keys move between them, Escape closes the list. Without this script
// Enter opens the page with the results.
const TYPING_MS = 200;

function suggest(form) {
  const [box, status, list] = form.children;
  let timer = null;
  let latest = null;

  function close() {
    latest?.abort();
    clearTimeout(timer);
    list.hidden = true;
    status.textContent = "";
  }

  async function load() {
    latest?.abort();
    const own = latest = new AbortController();
    try {
      const response = await fetch(`/search/suggestions?q=${encodeURIComponent(box.value)}`, { signal: own.signal, redirect: "manual" });
      if (!response.ok) return close();
      list.innerHTML = await response.text();
    } catch {
      // A newer search, or no connection: Enter still works.
      return;
    }
    renderTimes(list);
    list.hidden = false;
    status.textContent = list.firstElementChild.dataset.summary;
  }

  box.addEventListener("input", () => {
    close();
    if (box.value.trim() !== "") timer = setTimeout(load, TYPING_MS);
  });
  form.addEventListener("focusout", (event) => {
    if (!form.contains(event.relatedTarget)) close();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !list.hidden) {
      event.preventDefault();
      close();
      box.focus();
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || list.hidden) return;
    event.preventDefault();
    const stops = [box, ...list.querySelectorAll("a")];
    stops[(stops.indexOf(document.activeElement) + step + stops.length) % stops.length].focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
    // Behind a modal dialog nothing can be focused.
    if (document.querySelector("dialog:modal")) return;
    event.preventDefault();
    box.focus();
    box.select();
  });
}

// Tenants whose id or name matches, as the options of the inputs that ask for one.
async function suggestTenants(input) {
  const response = await fetch(`/search/tenants?q=${encodeURIComponent(input.value)}`, { redirect: "manual" });
  if (response.ok) input.list.innerHTML = await response.text();
}

document.querySelectorAll("input[list=tenants]").forEach((input) => {
  let timer = null;
  const ask = () => suggestTenants(input).catch(() => { /* The id can still be typed. */ });
  input.addEventListener("focus", ask, { once: true });
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, TYPING_MS);
  });
});

// Filters by time. The attribute has what the server wrote; the property may be what the user had typed before going back.
document.querySelectorAll("input[data-utc]").forEach((input) => {
  const at = new Date(`${input.getAttribute("value")}Z`);
  if (!Number.isNaN(at.getTime())) input.value = new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19);
  const zone = new Intl.DateTimeFormat(undefined, { timeZoneName: "short" }).formatToParts(new Date());
  input.labels[0].querySelector("[data-zone]").textContent = zone.find((part) => part.type === "timeZoneName").value;
  input.form.addEventListener("formdata", (event) => {
    if (input.value !== "") event.formData.set(input.name, new Date(input.value).toISOString());
  });
});

const searchBox = document.querySelector("form.search");
if (searchBox) suggest(searchBox);

// Without this script dialogs are popovers. Modal ones keep the focus inside, and a click beside them does not lose the form.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[popovertarget]");
  const dialog = button && document.getElementById(button.getAttribute("popovertarget"));
  if (!(dialog instanceof HTMLDialogElement)) return;
  event.preventDefault();
  if (button.popoverTargetAction === "hide") dialog.close();
  else dialog.showModal();
});

document.querySelectorAll("dialog[open]").forEach((dialog) => {
  dialog.close();
  dialog.showModal();
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  const dialog = document.querySelector("#confirm");
  if (!form.dataset.confirm || !dialog || form.elements.confirmed?.value === "yes") return;
  event.preventDefault();
  const choice = form.querySelector("select");
  dialog.querySelector("p").textContent = form.dataset.confirm.replace("{choice}", choice ? choice.value : "");
  dialog.returnValue = "";
  dialog.onclose = () => {
    if (dialog.returnValue !== "yes") return;
    if (form.elements.confirmed) form.elements.confirmed.value = "yes";
    form.submit();
  };
  dialog.showModal();
});

// Arrow keys change a select one option at a time: the first one must not lead away from the others.
document.addEventListener("pointerdown", ({ target }) => { if (target.dataset?.submit !== undefined) target.dataset.submit = ""; });
document.addEventListener("keydown", ({ key, target }) => {
  if (target.dataset?.submit === undefined) return;
  if (key === "Enter") target.form.requestSubmit();
  else target.dataset.submit = "keys";
});

document.addEventListener("change", (event) => {
  if (event.target.dataset.submit === "") event.target.form.requestSubmit();
  const all = event.target.dataset.all;
  if (all) event.target.form.querySelectorAll(`[name="${CSS.escape(all)}"]`).forEach((box) => { box.checked = event.target.checked; });
});

document.addEventListener("input", ({ target }) => {
  if (!target.dataset.search) return;
  const list = document.querySelector(target.dataset.search);
  const wanted = target.value.trim().toLowerCase();
  const items = [...list.querySelectorAll("[data-item]")];
  items.forEach((item) => { item.hidden = !item.textContent.toLowerCase().includes(wanted); });
  list.querySelectorAll("[data-group]").forEach((group) => { group.hidden = !group.querySelector("[data-item]:not([hidden])"); });
  list.querySelector("[data-none]").hidden = items.some((item) => !item.hidden);
});

// Enter would submit the form that the search field is in.
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.dataset?.search) event.preventDefault();
});

// A type that is included in a chosen pattern can't be chosen a second time.
function disableIncluded() {
  const patterns = new Set([...document.querySelectorAll("[data-pattern]:checked")].map((box) => box.dataset.pattern));
  document.querySelectorAll("[data-included-in]").forEach((box) => {
    box.disabled = box.dataset.includedIn.split(" ").some((pattern) => patterns.has(pattern));
  });
}

disableIncluded();
document.addEventListener("change", ({ target }) => { if (target.dataset.pattern) disableIncluded(); });

// On a phone the menu is a strip: show where the reader is.
document.querySelector(".menu [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

// Remove ?done=… from the address, so that going back or reloading does not show the toast again.
const toast = document.querySelector(".toast");
if (toast) {
  const address = new URL(location.href);
  address.searchParams.delete("done");
  history.replaceState(null, "", address);
  setTimeout(() => toast.remove(), 6000);
}
