"use strict";

// Everything that comes from the server is put in as text, never as HTML.
const at = (id) => document.getElementById(id);
const sentence = at("status");
let scores = ""; // what a score is
let limits = { query_length: 1000, upload_bytes: 16 << 20, results: 100 };
let picture = null; // the file that was searched with last; null: a text was
let running = null; // aborts the search under way

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function say(text, wrong = false) {
  if (wrong) at("answer").hidden = true; // what is shown there answers another question
  sentence.textContent = text;
  sentence.classList.toggle("wrong", wrong);
}

const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
const tidy = (text) => text.trim().replace(/\s+([.,;:!?])/g, "$1"); // data sets write " ." where people write "."
const score = (hit) => hit.score.toFixed(3) + (hit.uncertainty === undefined ? "" : ` · uncertainty ${hit.uncertainty.toFixed(2)}`);

// ------------------------------------------------------------------------------------------------- what is answered

function image(row, size, alt) {
  return make("img", { src: `/api/images/${row}?size=${size}`, alt, loading: "lazy", decoding: "async" });
}

function frame(row, alt, open) {
  const button = make("button", { type: "button", class: "picture" });
  const shown = image(row, "small", alt);
  shown.addEventListener("error", () => button.classList.add("absent"));
  button.append(make("span", { class: "frame" }, shown));
  button.addEventListener("click", open);
  return button;
}

function pictureCard(hit) {
  const says = tidy(hit.captions[0] || hit.file_name);
  const button = frame(hit.row, says, () => enlarge(hit.row, `Number ${hit.rank}: ${hit.file_name}`, hit.captions));
  const line = make("span", { class: "line" }, make("b", {}, String(hit.rank)), make("span", {}, score(hit)));
  button.append(line, make("span", { class: "says", "aria-hidden": "true" }, says));
  return make("li", {}, button);
}

function captionRow(hit) {
  const open = () => enlarge(hit.row, `Number ${hit.rank}: the picture of this caption`, [hit.caption]);
  const text = make("div", {}, make("div", { class: "text" }, tidy(hit.caption)), make("div", { class: "line" }, score(hit)));
  return make("li", {}, make("b", {}, String(hit.rank)), text, frame(hit.row, "The picture of this caption", open));
}

function fill(list, hits) {
  const pictures = hits.length > 0 && hits[0].file_name !== undefined;
  list.className = pictures ? "pictures" : "captions";
  list.replaceChildren(...hits.map(pictures ? pictureCard : captionRow));
}

function slotRow(hits, number) {
  const list = make("ol", { "aria-label": `What slot ${number + 1} looked for` });
  fill(list, hits);
  return make("div", { class: "slot" }, make("h3", {}, `Slot ${number + 1}`), list);
}

function enlarge(row, title, captions) {
  const shown = at("large-picture");
  shown.src = `/api/images/${row}?size=large`;
  shown.alt = tidy(captions[0] || title);
  at("large-title").textContent = title;
  const different = new Set(captions.map(tidy));
  at("large-captions").replaceChildren(...[...different].map((caption) => make("li", {}, caption)));
  at("large").showModal();
}

function show(answer, asked) {
  at("asked").textContent = asked;
  const sent = at("sent");
  URL.revokeObjectURL(sent.src);
  sent.hidden = picture === null;
  if (picture) sent.src = URL.createObjectURL(picture);
  else sent.removeAttribute("src");
  const spread = answer.uncertainty === undefined ? "" : " Uncertainty is the log-determinant of a covariance; larger is less certain.";
  at("meaning").textContent = `A score is ${scores}; larger is closer.${spread}`;
  fill(at("results"), answer.results);
  const slots = answer.elements || [];
  at("slots").hidden = slots.length === 0;
  at("slot-count").textContent = String(slots.length);
  at("slot-rows").classList.toggle("columns", picture !== null);
  at("slot-rows").replaceChildren(...slots.map(slotRow));
  at("answer").hidden = false;
  at("examples").hidden = true;
  const found = count(answer.results.length, ...(picture ? ["caption", "captions"] : ["picture", "pictures"]));
  const unsure = answer.uncertainty === undefined ? "" : `; the uncertainty of the query is ${answer.uncertainty.toFixed(2)}`;
  const unknown = (answer.unknown || []).map((word) => `“${word}”`).join(", ");
  const besides = unknown && `. The run does not know ${unknown}; it looked for the other words`;
  say(`${found}, best first, in ${count(Math.round(answer.seconds * 1000), "millisecond", "milliseconds")}${unsure}${besides}`);
}

// ---------------------------------------------------------------------------------------------------- what is asked

async function ask(address, options, asked) {
  running?.abort();
  const mine = (running = new AbortController());
  say("Searching …");
  at("answer").setAttribute("aria-busy", "true");
  try {
    const response = await fetch(address, { ...options, signal: mine.signal });
    const answer = await response.json();
    if (response.ok) show(answer, asked);
    else say(answer.error, true);
  } catch (error) {
    if (mine.signal.aborted) return;
    say("The server does not answer; look whether it still runs.", true);
  }
  if (running === mine) at("answer").removeAttribute("aria-busy");
}

function parameters(query) {
  const wanted = new URLSearchParams(query);
  wanted.set("k", at("k").value);
  if (at("elements").checked) wanted.set("elements", "1");
  return wanted;
}

function search(remember) {
  const text = at("q").value.trim();
  if (picture) {
    const headers = { "Content-Type": picture.type || "application/octet-stream" };
    const address = `/api/search?${parameters({})}`;
    return ask(address, { method: "POST", body: picture, headers }, `Captions for ${picture.name}`);
  }
  if (!text) return say("Type a few words first.", true);
  const wanted = parameters({ q: text });
  if (remember) history.pushState(null, "", `/?${wanted}`);
  return ask(`/api/search?${wanted}`, {}, `“${text}”`);
}

function searchPicture(file) {
  if (at("file").disabled) return say(at("hint").textContent, true);
  if (file.size > limits.upload_bytes) {
    return say(`${file.name} has more than ${limits.upload_bytes >> 20} MiB; choose a smaller picture.`, true);
  }
  picture = file;
  at("q").value = "";
  history.replaceState(null, "", "/");
  return search(false);
}

function takeAddress() {
  const wanted = new URLSearchParams(location.search);
  at("q").value = wanted.get("q") || "";
  if ([...at("k").options].some((option) => option.value === wanted.get("k"))) at("k").value = wanted.get("k");
  at("elements").checked = wanted.get("elements") === "1" && !at("elements-choice").hidden;
  picture = null;
  if (at("q").value) search(false);
  else at("answer").hidden = true;
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  picture = null;
  search(true);
});
for (const id of ["k", "elements"]) {
  at(id).addEventListener("change", () => at("answer").hidden || search(true));
}
at("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = ""; // so that the same file can be chosen again
  if (file) searchPicture(file);
});
at("large").addEventListener("click", (event) => event.target === at("large") && at("large").close());
at("large").addEventListener("close", () => at("large-picture").removeAttribute("src"));
addEventListener("popstate", takeAddress);

const bringsFile = (event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragenter", (event) => bringsFile(event) && (at("drop").hidden = false));
addEventListener("dragleave", (event) => event.relatedTarget === null && (at("drop").hidden = true));
addEventListener("dragover", (event) => bringsFile(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!bringsFile(event)) return;
  event.preventDefault();
  at("drop").hidden = true;
  if (event.dataTransfer.files.length) searchPicture(event.dataTransfer.files[0]);
});

// -------------------------------------------------------------------------------------------------- how it all begins

async function begin() {
  const response = await fetch("/api/about");
  const about = await response.json();
  limits = about.limits;
  scores = about.score;
  const size = `${count(about.images, "picture", "pictures")}, ${count(about.captions, "caption", "captions")}`;
  const names = [...new Set([about.run, about.recipe]), `${about.dataset} ${about.split}`];
  at("about").textContent = [...names, size].join(" · ");
  at("q").maxLength = limits.query_length;
  at("sent").style.imageOrientation = about.upright ? "from-image" : "none"; // as the encoder sees it
  at("elements-choice").hidden = about.elements === 0;
  if (!about.text) {
    at("q").disabled = true;
    at("q").placeholder = "this run cannot search by text here";
  }
  if (!about.image) {
    at("file").disabled = true;
    at("hint").textContent = "This run cannot search by picture here; the messages of the server say why.";
  }
  at("examples").lastElementChild.replaceChildren(...about.examples.map(example));
  at("examples").hidden = about.examples.length === 0;
  takeAddress();
}

function example(text) {
  const button = make("button", { type: "button" }, tidy(text));
  button.addEventListener("click", () => {
    at("q").value = tidy(text);
    at("q").focus();
    at("form").requestSubmit();
  });
  return make("li", {}, button);
}

begin().catch(() => say("The server does not answer; look whether it still runs.", true));
