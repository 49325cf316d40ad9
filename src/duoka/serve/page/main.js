// Puts the page together.

import { fetchJson } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { keyDialog, settingsDialog } from "./dialogs.js";
import { byId, element, focusPrompt } from "./dom.js";
import { Monitor } from "./monitor.js";
import { StatusPoll, overallState } from "./status.js";
import { keepTheme, language } from "./store.js";
import { currentLanguage, say, setLanguage } from "./texts.js";

const monitor = new Monitor(byId("monitor"));
const askForKey = keyDialog();
let keyRefused = false; // the reader would not give one: asked again only when they send

setLanguage(language.read() ?? (navigator.language.startsWith("zh") ? "zh" : "en"));

const chat = new Chat({
  model: () => byId("models").value || byId("model").textContent,
  thinking: () => composer.thinking,
  askForKey: async () => {
    const answered = await askForKey();
    if (answered) onNewKey();
    return answered;
  },
  onState: (running) => composer.setRunning(running),
});

const composer = new Composer({
  onSend: (text, images) => chat.send(text, images),
  onStop: () => chat.stop(),
  numImagesBefore: () => chat.numImages,
});

const poll = new StatusPoll({ onStatus: showStatus, onKey: needKey });

function onNewKey() {
  keyRefused = false;
  loadModels();
  poll.ask();
}

async function needKey() {
  showState("key", { state: "key" });
  if (keyRefused) return;
  if (await askForKey()) onNewKey();
  else keyRefused = true;
}

let modelsLoaded = false;

async function loadModels() {
  const { data } = await fetchJson("/v1/models").catch(() => ({ data: null }));
  if (!data) return;
  const select = byId("models");
  const chosen = select.value;
  select.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
  if (data.some(({ id }) => id === chosen)) select.value = chosen;
  modelsLoaded = data.length > 0;
  select.hidden = data.length < 2;
  byId("model").hidden = data.length > 1;
}

function showStatus(status) {
  if (status === null) {
    showState("unreachable", {});
    // Its numbers are old; that it takes requests again is for the next status to say, or for
    // the reader to try.
    byId("monitor").classList.add("old");
    composer.setServer({ ready: true, maxImages: null });
    return;
  }
  byId("monitor").classList.remove("old");
  const overall = overallState(status.engines);
  showState(overall.state, overall);
  byId("model").textContent = status.model;
  document.title = `${status.model} · duoka`;
  composer.setServer({
    ready: ["ready", "some"].includes(overall.state),
    maxImages: status.images,
    switchesThinking: status.switches_thinking,
  });
  monitor.update(status);
  if (!modelsLoaded) loadModels();
}

const STATE_TEXTS = {
  ready: "stateReady", some: "stateSome", starting: "stateStarting", restarting: "stateRestarting",
  failed: "stateFailed", unreachable: "stateUnreachable", key: "stateKey",
};
const BANNERS = {
  starting: "bannerStarting", restarting: "bannerRestarting", failed: "bannerFailed",
  unreachable: "bannerUnreachable",
};

function showState(state, { ready, total, reason }) {
  byId("panel-button").dataset.state = state;
  say(byId("state"), STATE_TEXTS[state], { ready, total });
  const banner = byId("banner");
  banner.hidden = !(state in BANNERS);
  if (banner.hidden) return;
  const detail = reason ? [element("span", { class: "detail" }, reason)] : [];
  const written = `${state} ${reason ?? ""} ${currentLanguage()}`;
  if (banner.dataset.written === written) return; // or it would be read out every second
  banner.dataset.written = written;
  banner.replaceChildren(say(element("span"), BANNERS[state]), ...detail);
}

function switchTheme() {
  const { dataset } = document.documentElement;
  const dark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = dark ? "light" : "dark";
  keepTheme(dataset.theme);
}

function switchLanguage() {
  const other = currentLanguage() === "en" ? "zh" : "en";
  language.write(other);
  setLanguage(other);
  monitor.redraw();
}

const wide = matchMedia("(min-width: 64rem)");

/** Beside the conversation where there is room; else over it, and only when it is asked for. */
function showPanel(open) {
  document.body.classList.toggle("with-panel", open);
  byId("panel").hidden = !open;
  byId("panel-button").setAttribute("aria-expanded", open);
}

function closePanel() {
  showPanel(false);
  byId("panel-button").focus();
}

byId("panel-button").addEventListener("click", () => {
  showPanel(byId("panel").hidden);
  if (!byId("panel").hidden && !wide.matches) byId("panel-close").focus();
});
byId("panel-close").addEventListener("click", closePanel);
byId("panel").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !wide.matches) closePanel();
});
wide.addEventListener("change", () => showPanel(wide.matches));
byId("theme").addEventListener("click", switchTheme);
byId("language").addEventListener("click", switchLanguage);
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  byId("prompt").focus();
});
settingsDialog(() => {
  chat.clear();
  composer.showThinking();
});

showPanel(wide.matches);
say(byId("state"), "stateConnecting");
loadModels();
poll.ask();
focusPrompt();
