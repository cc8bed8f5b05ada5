// Progressive enhancement: every page works without this script. It never turns customer input into markup; the only HTML
// it inserts was rendered and escaped by the server.
//
//   <time datetime="…">             shown in the user's time zone, with the exact time on hover
//   <time data-countdown datetime>  "in 4 min 12 s", counting down; data-over is the text afterwards
//   <time data-ago datetime>        "12 s ago"
//   <… data-live="/address">        content updated with server-sent events
//   <… data-until-end>              removed after the last update
//   <button data-copy="#id">        copies the text of that element
//   <form data-confirm="…">         asks for confirmation before submitting
//   <select data-submit>            submits its form on change
//   <input data-all="name">         checks or unchecks all boxes with that name in its form
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

// A part that has the focus or a text selection is not updated, so that the user is not interrupted.
function isInUse(element) {
  const selection = document.getSelection();
  return element.contains(document.activeElement)
    || (selection !== null && !selection.isCollapsed && element.contains(selection.anchorNode));
}

document.querySelectorAll("[data-live]").forEach((element) => {
  const source = new EventSource(element.dataset.live);
  source.onmessage = (message) => {
    if (isInUse(element)) return;
    element.innerHTML = message.data;
    renderTimes(element);
  };
  // The server has no further updates.
  source.addEventListener("end", () => {
    source.close();
    document.querySelectorAll("[data-until-end]").forEach((over) => over.remove());
  });
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const from = document.querySelector(button.dataset.copy);
  const text = "value" in from ? from.value : from.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard needs a secure context. Select the text instead, so that it can be copied with the keyboard.
    document.getSelection().selectAllChildren(from);
    return;
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1500);
});

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
  const all = event.target.dataset.all;
  if (all) event.target.form.querySelectorAll(`[name="${CSS.escape(all)}"]`).forEach((box) => { box.checked = event.target.checked; });
});

// Remove ?done=… from the address, so that going back or reloading does not show the toast again.
const toast = document.querySelector(".toast");
if (toast) {
  const address = new URL(location.href);
  address.searchParams.delete("done");
  history.replaceState(null, "", address);
  setTimeout(() => toast.remove(), 6000);
}
