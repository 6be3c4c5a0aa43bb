// First of all scripts: it sets a language that they can use, and shows their failures in words.
"use strict";

try {
  new Intl.NumberFormat(navigator.language);
} catch { // without a locale it is "en-US@posix", an invalid language tag, with which uPlot fails
  Object.defineProperty(navigator, "language", { value: "en-US" });
}

function failed(what) {
  const box = document.getElementById("failed");
  if (!box.hidden) return; // the first failure causes the others
  box.hidden = false;
  box.textContent = `A part of this page failed: ${what}. The server goes on without it.`;
}

addEventListener("error", (event) => {
  const from = event.target && event.target.src;
  failed(from ? `${from} could not be loaded` : event.message);
}, true);
addEventListener("unhandledrejection", (event) => failed(String((event.reason && event.reason.message) || event.reason)));
