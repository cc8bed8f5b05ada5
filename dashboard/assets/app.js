// Makes the pages livelier; each works without it. Nothing here makes markup of what customers supply: the only HTML it
// puts into a page is what the server rendered and escaped.
//
//   <time datetime="…">             the reader's own zone, the exact time on hover
//   <time data-countdown datetime>  "in 4 min 12 s", counted down; data-over is what it says afterwards
//   <time data-ago datetime>        "12 s ago"
//   <… data-live="/address">        its content comes anew by server-sent events
//   <… data-until-end>              goes when the last of that has come
//   <button data-copy="#id">        copies the text of that element
//   <form data-confirm="…">         asks before it sends
//   <select data-submit>            sends its form when it changes
//   <input data-all="name">         ticks all boxes of that name in its form, or none
"use strict";

document.documentElement.classList.add("scripted");

const sameDay = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const otherDay = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
const otherYear = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

function spell(seconds) {
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function tell(element) {
  const at = new Date(element.dateTime);
  if (Number.isNaN(at.getTime())) return;
  element.title = `${at.toString()}\n${at.toISOString()}`;
  const left = (at - Date.now()) / 1000;
  if ("countdown" in element.dataset) {
    element.textContent = left > 0 ? `in ${spell(left)}` : element.dataset.over || "now";
  } else if ("ago" in element.dataset) {
    element.textContent = `${spell(Math.max(0, -left))} ago`;
  } else {
    const now = new Date();
    const form = at.toDateString() === now.toDateString() ? sameDay : at.getFullYear() === now.getFullYear() ? otherDay : otherYear;
    element.textContent = form.format(at);
  }
}

function tellAll(root) {
  root.querySelectorAll("time[datetime]").forEach(tell);
}

tellAll(document);
setInterval(() => document.querySelectorAll("time[data-countdown], time[data-ago]").forEach(tell), 1000);

// A part that somebody has a finger on is left alone until they have moved on.
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
    tellAll(element);
  };
  // The server has nothing more to tell.
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
    // Not a secure context: select it, so that the keyboard can copy it.
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

// What was done is told once: going back or reloading does not tell it again.
const toast = document.querySelector(".toast");
if (toast) {
  const address = new URL(location.href);
  address.searchParams.delete("done");
  history.replaceState(null, "", address);
  setTimeout(() => toast.remove(), 6000);
}
