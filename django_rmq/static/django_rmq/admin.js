// Keeps the figures of a page up to date, selects all rows at once, and guards against the second press of a button.
// A page works without it. The parts of a page are elements with data-rmq-part; the address in data-rmq-live answers
// the same parts with newer figures. Nothing is fetched while nobody sees the page.
"use strict";

(() => {
  const live = document.querySelector("[data-rmq-live]");
  if (live) keepFresh(live);
  for (const all of document.querySelectorAll("[data-rmq-all]")) selectAll(all);
  sendOnce();
  for (const form of document.querySelectorAll("form[data-rmq-go-on]")) form.requestSubmit();

  function keepFresh(live) {
    const select = live.querySelector("select");
    const said = live.querySelector("[data-rmq-said]");
    const stored = remembered();
    if (stored !== null && [...select.options].some((option) => option.value === stored)) select.value = stored;
    live.hidden = false;

    const warning = document.querySelector("[data-rmq-warning]");
    const title = document.title.replace(/^\(\d+\) /, "");
    const inWords = (time) => time.toLocaleTimeString();

    let timer = 0;
    let busy = false;
    let current = new Date();

    const seconds = () => Number(select.value);
    const show = (state, words) => {
      live.dataset.state = state;
      if (said.textContent !== words) said.textContent = words;
    };

    // What is shown is no longer so: it fades, the title says it, and a banner says since when and why.
    const warn = (state, words, reason) => {
      show(state, "");
      document.title = `⚠ ${title}`;
      for (const part of document.querySelectorAll("[data-rmq-part]")) part.classList.add("rmq-is-stale");
      warning.querySelector("strong").textContent = words.replace("{time}", inWords(current));
      warning.querySelector("p").textContent = reason;
      warning.querySelector("a").hidden = state !== "ended";
      warning.hidden = false;
    };

    // The title and the icon say how many findings need attention, for those who look at another tab.
    const count = () => {
      const { rmqFindings = "0", rmqIcon = "" } = document.querySelector("[data-rmq-part=findings]")?.dataset ?? {};
      document.title = rmqFindings === "0" ? title : `(${rmqFindings}) ${title}`;
      let icon = document.querySelector("link[data-rmq-favicon]");
      if (!rmqIcon) return icon?.remove();
      if (!icon) {
        icon = document.createElement("link");
        icon.rel = "icon";
        icon.type = "image/svg+xml";
        icon.dataset.rmqFavicon = "";
        document.head.append(icon);
      }
      if (icon.getAttribute("href") !== rmqIcon) icon.setAttribute("href", rmqIcon);
    };

    const fresh = () => {
      current = new Date();
      count();
      for (const part of document.querySelectorAll(".rmq-is-stale")) part.classList.remove("rmq-is-stale");
      warning.hidden = true;
      show("on", inWords(current));
    };

    const plan = () => {
      clearTimeout(timer);
      if (seconds() && !document.hidden) timer = setTimeout(refresh, seconds() * 1000);
    };

    const refresh = async () => {
      if (busy || document.hidden || !seconds()) return;
      busy = true;
      try {
        const answer = await fetch(live.dataset.rmqLive, {
          credentials: "same-origin",
          headers: { "X-Requested-With": "XMLHttpRequest" },
          redirect: "manual",
          signal: AbortSignal.timeout(10000),
        });
        if (answer.ok && answer.headers.get("X-RMQ-Fragment")) {
          take(await answer.text());
          fresh();
        } else if (answer.type === "opaqueredirect" || answer.status === 403) {
          // The admin leads people without a session to its login page.
          warn("ended", live.dataset.ended, "");
        } else {
          warn("away", live.dataset.away, reasonOf(await answer.text()));
        }
      } catch {
        warn("away", live.dataset.away, live.dataset.unreachable);
      }
      busy = false;
      plan();
    };

    select.addEventListener("change", () => {
      remember(select.value);
      show(seconds() ? "on" : "off", "");
      plan();
    });
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
    show(seconds() ? "on" : "off", "");
    plan();
  }

  // A page that says what is wrong says it in a banner.
  function reasonOf(html) {
    const page = new DOMParser().parseFromString(html, "text/html");
    return page.querySelector(".rmq-banner[role=alert] p")?.textContent ?? "";
  }

  function remembered() {
    try {
      return localStorage.getItem("rmq-refresh");
    } catch {
      return null;
    }
  }

  function remember(value) {
    try {
      localStorage.setItem("rmq-refresh", value);
    } catch {
      // A browser that keeps nothing asks again on the next page.
    }
  }

  function take(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    for (const part of fresh.querySelectorAll("[data-rmq-part]")) {
      const shown = document.querySelector(`[data-rmq-part="${part.dataset.rmqPart}"]`);
      if (shown) sync(shown, part);
    }
  }

  // Changes only what differs, so that focus, selection and open details stay where they are.
  function sync(shown, fresh) {
    for (const { name } of [...shown.attributes]) {
      if (name !== "open" && !fresh.hasAttribute(name)) shown.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
    }
    const wanted = [...fresh.childNodes];
    while (shown.childNodes.length > wanted.length) shown.lastChild.remove();
    wanted.forEach((node, i) => {
      const old = shown.childNodes[i];
      if (!old) shown.append(document.importNode(node, true));
      else if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) old.replaceWith(document.importNode(node, true));
      else if (node.nodeType === Node.ELEMENT_NODE) sync(old, node);
      else if (old.nodeValue !== node.nodeValue) old.nodeValue = node.nodeValue;
    });
  }

  function selectAll(all) {
    const boxes = [...document.querySelectorAll('input[type="checkbox"][name="id"]')];
    const show = () => {
      const checked = boxes.filter((box) => box.checked).length;
      all.checked = checked > 0 && checked === boxes.length;
      all.indeterminate = checked > 0 && checked < boxes.length;
      for (const count of document.querySelectorAll("[data-rmq-selected]")) count.textContent = String(checked);
    };
    all.hidden = false;
    all.addEventListener("change", () => {
      for (const box of boxes) box.checked = all.checked;
      show();
    });
    for (const box of boxes) box.addEventListener("change", show);
    show();
  }

  // Listens at the document, because the parts of a page and their forms come and go.
  function sendOnce() {
    const ours = ":is(.rmq, .rmq-undo)";
    let sent = new WeakSet();
    document.addEventListener("submit", (event) => {
      const form = event.target;
      if (form.method !== "post" || !form.closest(ours)) return;
      if (sent.has(form)) event.preventDefault();
      sent.add(form);
      // After the browser has gathered the form, or the pressed button's own value would be missing.
      setTimeout(() => {
        for (const button of form.querySelectorAll("button")) button.disabled = true;
      });
    });
    // Back from the next page, the forms can be sent again.
    addEventListener("pageshow", () => {
      sent = new WeakSet();
      for (const button of document.querySelectorAll(`${ours} button`)) button.disabled = false;
    });
  }
})();
