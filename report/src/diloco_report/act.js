"use strict";
// The actions: each form is sent after it was confirmed, with the token in a header, and the answer is shown as text.
(() => {
  if (location.hash.length > 1) {
    sessionStorage.setItem("token", location.hash.slice(1));
    history.replaceState(null, "", location.pathname);
  }
  const actions = document.getElementById("actions"), dialog = document.getElementById("confirm");
  const said = document.getElementById("said"), asked = document.getElementById("asked"), lines = document.getElementById("lines");
  const NO_TOKEN = "this tab does not have the token: open the address that the command has printed, as a whole";
  const send = async (name, values) => {
    try {
      const answer = await fetch("act/" + name, {
        method: "POST",
        headers: { "Content-Type": "application/json", Authorization: "Bearer " + sessionStorage.getItem("token") },
        body: JSON.stringify(values),
      });
      if (answer.status === 401) {
        sessionStorage.removeItem("token");
        return { error: NO_TOKEN };
      }
      return answer.headers.get("Content-Type").startsWith("application/json") ? await answer.json() : { error: await answer.text() };
    } catch (error) {
      return { error: "no answer: diloco page has ended, or cannot be reached. Look at the run's changes before you try again" };
    }
  };
  const show = (within, answer) => {
    within.classList.toggle("failed", Boolean(answer.error) || answer.code > 0);
    within.textContent = answer.error || answer.lines.join("\n");
  };
  const busy = (on) => {
    actions.setAttribute("aria-busy", on);
    for (const button of actions.querySelectorAll("button")) button.disabled = on;
  };
  let waiting = null;
  actions.addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = event.target;
    if (!form.dataset.act) return;
    const values = Object.fromEntries(new FormData(form));
    if (sessionStorage.getItem("token") === null) return show(said, { error: NO_TOKEN });
    asked.textContent = form.dataset.ask.replace(/\{(\w+)\}/g, (_, key) => values[key] || form.elements[key].placeholder);
    lines.textContent = "";
    if (form.dataset.preview) {
      busy(true);
      said.textContent = "looking what would be lost …";
      const found = await send(form.dataset.preview, values);
      busy(false);
      if (found.error) return show(said, found);
      said.textContent = "";
      show(lines, found);
    }
    waiting = { name: form.dataset.act, values };
    dialog.showModal();
  });
  dialog.addEventListener("close", async () => {
    const { name, values } = waiting;
    if (dialog.returnValue !== "yes") return;
    busy(true);
    said.classList.remove("failed");
    said.textContent = `${name}: under way …`;
    show(said, await send(name, values));
    busy(false);
  });
  dialog.addEventListener("cancel", () => { dialog.returnValue = ""; });
})();
