"use strict";
/* Elements, numbers and small helpers. Text becomes text nodes only: nothing here parses markup. */

const byId = (id) => document.getElementById(id);
const known = (value) => typeof value === "number";
const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : (many ?? one + "s")}`;
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const unique = (values) => [...new Set(values)];
const joined = (texts, between = " \u00b7 ") => texts.filter(Boolean).join(between);

/* A new element. Names that begin with "on" are listeners; true and false are present and absent attributes. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css")
      for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const button = (label, onclick, attributes = {}) => el("button", { type: "button", onclick, ...attributes }, label);
const toggle = (label, pressed, onclick, attributes = {}) =>
  button(label, onclick, { "aria-pressed": String(pressed), ...attributes });

/* A choice among [value, text] pairs. `choose` gets the value of the chosen one. */
function select(label, options, chosen, choose, attributes = {}) {
  return el(
    "select",
    { "aria-label": label, onchange: (event) => choose(event.target.value), ...attributes },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
}

/* "0.9", "12.35", "1.2e-6": at most `digits` decimals, without trailing zeros. */
function format(value, digits = 3) {
  if (!known(value)) return value === null || value === undefined ? "none" : String(value);
  if (value !== 0 && (Math.abs(value) < 10 ** -digits || Math.abs(value) >= 1e7))
    return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toFixed(digits)));
}

const plainText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/* Calls `show` once, when `node` comes near the visible part of the page: long responses and images cost nothing before. */
const waiting = new WeakMap();
const observer = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      waiting.get(target)?.();
      waiting.delete(target);
    }
  },
  { rootMargin: "600px" },
);

function whenNear(node, show) {
  waiting.set(node, show);
  observer.observe(node);
  return node;
}

function showTip(text, box) {
  const tip = byId("tip");
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.replaceChildren(...[text].flat());
  const size = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(box.left, innerWidth - size.width - 6)) + "px";
  tip.style.top = (box.top > size.height + 10 ? box.top - size.height - 6 : box.bottom + 6) + "px";
}

addEventListener("mouseover", (event) => {
  const text = event.target.tipText?.();
  if (text || !event.target.closest?.(".chart")) showTip(text, event.target.getBoundingClientRect?.());
});

/* Light or dark: the system's choice until the switch is used. */
const THEMES = { auto: "\u25d0 auto", light: "\u2600 light", dark: "\u263e dark" };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme];
  try {
    localStorage.setItem("vlmrl-theme", theme);
  } catch {
    /* a page without storage starts with auto */
  }
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
}

function storedTheme() {
  try {
    return localStorage.getItem("vlmrl-theme") ?? "auto";
  } catch {
    return "auto";
  }
}
