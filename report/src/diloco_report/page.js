"use strict";
// Answers a pointer over the pictures, and the buttons. Listeners are the document's, so that parts may be replaced.
const page = (() => {
  const tip = document.getElementById("tip");
  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth;
    tip.style.left = Math.max(4, right ? event.clientX - box.width - 14 : event.clientX + 16) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + "px";
  };
  const hidden = new Set();
  document.addEventListener("pointermove", (event) => {
    tip.hidden = true;
    const target = event.target.closest ? event.target : null;
    if (target && target.dataset.tip) {
      tip.textContent = target.dataset.tip;
      place(event);
    }
  });
  // Show within an element what the buttons say: all, except the names that are hidden.
  const show = (within) => {
    document.dispatchEvent(new CustomEvent("shown", { detail: within }));
    for (const element of within.querySelectorAll("[data-name]")) {
      element.classList.toggle("hidden", hidden.has(element.dataset.name));
    }
    for (const button of within.querySelectorAll("button[data-toggle]")) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.toggle)));
    }
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && button.dataset.toggle !== undefined) {
      const name = button.dataset.toggle;
      if (!hidden.delete(name)) hidden.add(name);
      show(document);
    } else if (button && button.id === "theme") {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
    }
  });
  return { show, hidden, tip, place };
})();
