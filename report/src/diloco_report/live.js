// Goes on with a page that a server gave out: takes over parts that were drawn again, and says when nothing comes.
(() => {
  const link = document.getElementById("link");
  const say = (text) => {
    link.classList.remove("late");
    link.hidden = !text;
    if (link.textContent !== text) link.textContent = text;
  };
  // How an element is found again after its part was replaced: the same kind and words, at the same place among its like.
  const place = (part, element) => [...part.querySelectorAll(element.tagName)].indexOf(element);
  const take = (part, text) => {
    const open = [...part.querySelectorAll("details")].map((details) => details.open);
    const scrolled = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    const at = focused && place(part, focused);
    const fresh = document.createElement("template");
    fresh.innerHTML = text;
    part.replaceChildren(fresh.content);
    part.querySelectorAll("details").forEach((details, i) => { details.open = Boolean(open[i]); });
    part.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = scrolled[i] || 0; });
    page.show(part);
    const again = focused && part.querySelectorAll(focused.tagName)[at];
    if (again) again.focus({ preventScroll: true });
  };
  let state = document.getElementById("state").dataset.state;
  const runOf = (state) => state.split("-")[0];
  const AGAIN_MS = 3000;  // a browser does not try again by itself where a server refused, as one that begins may
  const SILENT_MS = 45000;  // a server without news says so every 15 s: it is frozen, or the way to it is cut without a word
  const LOST = "Nothing comes from the coordinator: it is restarted, or cannot be reached. The page goes on by itself when it is back.";
  let silent;
  const listen = () => {
    const source = new EventSource("events?since=" + encodeURIComponent(state));
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(() => {
        source.close();
        say(LOST);
        listen();
      }, SILENT_MS);
    };
    heard();
    source.addEventListener("open", () => {
      heard();
      say("");
    });
    source.addEventListener("quiet", heard);
    source.addEventListener("parts", (event) => {
      heard();
      if (runOf(event.lastEventId) !== runOf(state)) {  // another run at this address by now, or a page with another script
        source.close();
        location.reload();
        return;
      }
      state = event.lastEventId;
      for (const [name, text] of Object.entries(JSON.parse(event.data))) {
        const part = document.getElementById("part-" + name);
        if (part) take(part, text);
      }
    });
    source.addEventListener("over", (event) => {
      clearTimeout(silent);
      source.close();
      say("The run is over. ");
      if (!event.data) return;
      const report = document.createElement("a");  // the server that sent it ends with the run
      report.textContent = "Save its report";
      report.href = URL.createObjectURL(new Blob([JSON.parse(event.data)], { type: "text/html" }));
      report.download = "report.html";
      link.append(report, ", a page that needs no server. From then on diloco page shows it too.");
    });
    source.addEventListener("error", async () => {
      say(LOST);
      if (source.readyState !== EventSource.CLOSED) return;
      const asked = await fetch("page.js", { method: "HEAD" }).catch(() => ({ status: 0 }));
      if (asked.status === 401) location.reload();  // it wants another token by now, for which its form asks
      else setTimeout(listen, AGAIN_MS);
    });
  };
  listen();
})();
