// Keeps the live part of a page up to date: the page is fetched again every data-refresh seconds while it is
// visible, and its element replaces this one. What somebody is just about to press is left alone.
"use strict";

for (const element of document.querySelectorAll("[data-refresh]")) {
  const refresh = async () => {
    if (document.hidden || element.contains(document.activeElement)) return;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!element.contains(document.activeElement)) element.innerHTML = page.getElementById(element.id).innerHTML;
    } catch {
      // The server is away: what is shown stays, and the next round asks again.
    }
  };

  const loop = async () => {
    await refresh();
    setTimeout(loop, Number(element.dataset.refresh) * 1000);
  };
  setTimeout(loop, Number(element.dataset.refresh) * 1000);
  document.addEventListener("visibilitychange", refresh);
}
