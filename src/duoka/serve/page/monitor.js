// The panel: each device's memory against its plan, requests, tokens a second.

import { element, svg } from "./dom.js";
import { formatBytes, formatNumber, label, say } from "./texts.js";

const HISTORY = 60; // seconds of the little curve
const KINDS = ["weights", "kvCache", "rest"];

export class Monitor {
  #root;
  #shape = null; // which engines and devices the nodes are for
  #devices = [];
  #speeds = [];
  #last = null;

  constructor(root) {
    this.#root = root;
  }

  update(status) {
    this.#last = status;
    const shape = JSON.stringify(status.engines.map((engine) => engine.devices.map((device) => device.name)));
    if (shape !== this.#shape) this.#build(status, shape);
    this.#speeds = [...this.#speeds, status.tokens_per_second].slice(-HISTORY);
    this.#draw(status);
  }

  /** The numbers anew, as a new language writes them. */
  redraw() {
    if (this.#last) this.#draw(this.#last);
  }

  #build(status, shape) {
    this.#shape = shape;
    this.figures = new Figures();
    this.pages = new Pages();
    this.engines = status.engines.map((engine) => new EngineView(engine, status.engines.length > 1));
    this.capacity = element("p", { class: "quiet" });
    this.version = element("p", { class: "quiet" });
    this.#root.replaceChildren(
      this.figures.node, this.pages.node, ...this.engines.map((view) => view.node),
      legend(), this.capacity, this.version,
    );
  }

  #draw(status) {
    this.figures.update(status, this.#speeds);
    this.pages.update(status.pages);
    status.engines.forEach((engine, index) => this.engines[index].update(engine));
    const { sequences, context_tokens: tokens } = status;
    say(this.capacity, "capacity", { sequences: formatNumber(sequences), tokens: formatNumber(tokens) });
    say(this.version, "version", { version: status.version });
  }
}

class Figures {
  constructor() {
    this.running = element("b");
    this.waiting = element("b");
    this.speed = element("b");
    this.line = svg("polyline");
    const curve = svg("svg", { class: "curve", viewBox: `0 0 ${HISTORY - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.line);
    this.node = element(
      "div",
      {},
      element(
        "dl",
        { class: "figures" },
        figure("running", this.running), figure("waiting", this.waiting), figure("speed", this.speed),
      ),
      curve,
    );
  }

  update({ running, waiting, tokens_per_second: speed }, speeds) {
    this.running.textContent = formatNumber(running);
    this.waiting.textContent = formatNumber(waiting);
    this.speed.textContent = formatNumber(speed, speed < 10 ? 1 : 0);
    const most = Math.max(...speeds, 1);
    const start = HISTORY - speeds.length;
    const points = speeds.map((value, index) => `${start + index},${(19 - (value / most) * 18).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
  }
}

function figure(name, number) {
  return element("div", {}, say(element("dt"), name), element("dd", {}, number));
}

class Pages {
  constructor() {
    this.text = element("span", { class: "amount" });
    this.fill = element("div", { class: "part kvCache" });
    this.node = element(
      "section",
      { class: "device" },
      element("div", { class: "row" }, say(element("h3"), "pages"), this.text),
      element("div", { class: "bar thin", "aria-hidden": "true" }, this.fill),
    );
  }

  update(pages) {
    this.node.hidden = pages === null;
    if (pages === null) return;
    const used = pages.total - pages.free;
    say(this.text, "pagesUsed", { used: formatNumber(used), total: formatNumber(pages.total) });
    setWidth(this.fill, used, pages.total);
  }
}

class EngineView {
  constructor(engine, isOneOfSeveral) {
    this.state = element("span", { class: "amount" });
    this.reason = element("p", { class: "wrong" });
    this.devices = engine.devices.map((device) => new DeviceView(device));
    this.title = element("div", { class: "row replica", hidden: !isOneOfSeveral },
      say(element("h3"), "replica", { number: engine.replica }), this.state);
    this.node = element("div", {}, this.title, this.reason, ...this.devices.map((view) => view.node));
  }

  update(engine) {
    const names = { ready: "stateReady", starting: "stateStarting", restarting: "stateRestarting", failed: "stateFailed" };
    say(this.state, names[engine.state] ?? "stateStarting");
    this.node.dataset.state = engine.state;
    this.reason.hidden = !engine.reason || this.title.hidden;
    this.reason.textContent = engine.reason ?? "";
    engine.devices.forEach((device, index) => this.devices[index].update(device));
  }
}

class DeviceView {
  constructor({ name, gpu }) {
    this.busy = element("span", { class: "amount" });
    this.amount = element("span");
    this.forecast = element("span", { class: "amount" });
    this.parts = Object.fromEntries(KINDS.map((kind) => [kind, element("div", { class: `part ${kind}` })]));
    this.mark = element("div", { class: "mark" });
    this.bar = element("div", { class: "bar", role: "img" }, ...Object.values(this.parts), this.mark);
    this.node = element(
      "section",
      { class: "device" },
      element("div", { class: "row" }, element("h3", {}, name, element("small", {}, gpu ?? "")), this.busy),
      this.bar,
      element("div", { class: "row numbers" }, this.amount, this.forecast),
    );
  }

  update(device) {
    const { budget_bytes: budget, forecast_bytes: forecast, reserved_bytes: reserved } = device;
    const shown = reserved ?? forecast;
    const scale = Math.max(budget, shown, forecast);
    const bytes = split(device, shown);
    for (const kind of KINDS) setWidth(this.parts[kind], bytes[kind], scale);
    this.mark.style.left = `${percent(forecast, scale)}%`;
    this.bar.classList.toggle("planned", reserved === null);
    this.#write(device, { budget, forecast, reserved, shown });
  }

  #write(device, { budget, forecast, reserved, shown }) {
    const values = { reserved: formatBytes(shown), forecast: formatBytes(forecast), budget: formatBytes(budget) };
    say(this.amount, reserved === null ? "plannedOf" : "reservedOf", values);
    label(this.bar, "barIs", { ...values, device: device.name });
    const share = device.busy_share;
    this.busy.hidden = share === null;
    if (share !== null) say(this.busy, "busy", { share: `${formatNumber(share * 100)} %` });
    this.#writeForecast(reserved ?? 0, forecast, budget, values);
  }

  #writeForecast(reserved, forecast, budget, values) {
    const over = reserved > budget ? "aboveBudget" : reserved > forecast ? "aboveForecast" : null;
    const bytes = formatBytes(reserved - (over === "aboveBudget" ? budget : forecast));
    say(this.forecast, over ?? "forecastIs", over ? { bytes } : values);
    this.node.dataset.over = over ?? "";
  }
}

/** What is reserved, by kind: weights come first, so a bar fills up as a model is loaded. */
function split(device, shown) {
  const weights = Math.min(device.weights_bytes, shown);
  const kvCache = Math.min(device.kv_cache_bytes, shown - weights);
  return { weights, kvCache, rest: shown - weights - kvCache };
}

const percent = (value, whole) => (whole > 0 ? Math.min(100, Math.max(0, (value / whole) * 100)) : 0);

function setWidth(node, value, whole) {
  node.style.width = `${percent(value, whole)}%`;
}

function legend() {
  const entries = [...KINDS, "free", "forecast"].map((kind) =>
    element("li", {}, element("i", { class: `part ${kind}` }), say(element("span"), kind)));
  return element("ul", { class: "legend" }, ...entries);
}
