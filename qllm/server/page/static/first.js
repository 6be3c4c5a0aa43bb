// Runs before all other scripts: a language that they can use, and what failed in them, in words.
"use strict";

try {
  new Intl.NumberFormat(navigator.language);
} catch { // "en-US@posix" of a machine without a locale is no language tag, and uPlot dies of it
  Object.defineProperty(navigator, "language", { value: "en-US" });
}

function failed(what) {
  const box = document.getElementById("failed");
  if (!box.hidden) return; // the first failure is the reason of the others
  box.hidden = false;
  box.textContent = `A part of this page failed: ${what}. The server goes on without it.`;
}

addEventListener("error", (event) => {
  const from = event.target && event.target.src;
  failed(from ? `${from} could not be loaded` : event.message);
}, true);
addEventListener("unhandledrejection", (event) => failed(String((event.reason && event.reason.message) || event.reason)));
