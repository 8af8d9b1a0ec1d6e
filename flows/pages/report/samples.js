// Searches, filters and orders the sample of trajectories in a report. Without scripts, the whole list is shown.
"use strict";
(() => {
  const one = (selector) => document.querySelector(selector);
  const samples = [...document.querySelectorAll("details.sample")], list = one("#samples");

  const orders = {
    newest: ["step", -1], oldest: ["step", 1], highest: ["reward", -1], lowest: ["reward", 1], longest: ["length", -1],
    drawn: ["draws", -1],
  };
  const choices = {
    all: () => true,
    high: ({ reward }) => reward > Number(list.dataset.middle),
    low: ({ reward }) => reward <= Number(list.dataset.middle),
    drawn: ({ draws }) => draws > 0,
    never: ({ draws }) => Number(draws) === 0,
  };

  function update() {
    const words = one("#words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = choices[one("#which").value], [name, way] = orders[one("#order").value];
    const says = (it) => words.every((word) => it.textContent.toLowerCase().includes(word));
    const found = samples.filter((it) => chosen(it.dataset) && says(it));
    list.replaceChildren(...found.sort((a, b) => way * (a.dataset[name] - b.dataset[name])));
    one("#found").textContent = `${found.length} of ${samples.length}`;
  }

  if (list) {
    for (const control of ["#words", "#which", "#order"]) one(control).addEventListener("input", update);
    update();
  }
})();
