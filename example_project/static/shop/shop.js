// Keeps every element with data-refresh up to date: its content is fetched anew every data-seconds while
// the page is visible. What somebody is just about to press is left alone.
"use strict";

for (const element of document.querySelectorAll("[data-refresh]")) {
  let shown = null;

  const refresh = async () => {
    if (document.hidden || element.contains(document.activeElement)) return;
    try {
      const answer = await fetch(element.dataset.refresh, { credentials: "same-origin" });
      if (!answer.ok) return;
      const html = await answer.text();
      if (html !== shown && !element.contains(document.activeElement)) element.innerHTML = html;
      shown = html;
    } catch {
      // The server is away: what is shown stays, and the next round asks again.
    }
  };

  const loop = async () => {
    await refresh();
    setTimeout(loop, Number(element.dataset.seconds) * 1000);
  };
  setTimeout(loop, Number(element.dataset.seconds) * 1000);
  document.addEventListener("visibilitychange", refresh);
}
