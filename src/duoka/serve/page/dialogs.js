// The two dialogs: settings, and the key.

import { byId } from "./dom.js";
import { forgetEverything, key, settings } from "./store.js";

const number = (input) => (input.value !== "" && input.validity.valid ? input.valueAsNumber : null);

export function settingsDialog(onForget) {
  const dialog = byId("settings");
  const [system, temperature, maxTokens] = ["system", "temperature", "max-tokens"].map(byId);
  function fill() {
    const kept = settings.read();
    system.value = kept.system;
    temperature.value = kept.temperature ?? "";
    maxTokens.value = kept.maxTokens ?? "";
  }
  for (const input of [system, temperature, maxTokens]) {
    input.addEventListener("input", () => settings.write({
      ...settings.read(),
      system: system.value.trim(), temperature: number(temperature), maxTokens: number(maxTokens),
    }));
  }
  byId("settings-button").addEventListener("click", () => {
    fill();
    dialog.showModal();
  });
  byId("forget").addEventListener("click", () => {
    forgetEverything();
    fill();
    dialog.close();
    onForget();
  });
}

/** Asks for a key; resolves to whether one was given. Asked again meanwhile, it is one question. */
export function keyDialog() {
  const dialog = byId("key");
  const input = byId("key-input");
  let question = null;
  byId("key-cancel").addEventListener("click", () => dialog.close("cancel"));
  return function ask() {
    question ??= new Promise((resolve) => {
      byId("key-wrong").hidden = !key.read();
      input.value = "";
      dialog.returnValue = "cancel";
      dialog.addEventListener("close", () => {
        question = null;
        const secret = input.value.trim();
        const answered = dialog.returnValue !== "cancel" && secret !== "";
        if (answered) key.write(secret);
        input.value = "";
        resolve(answered);
      }, { once: true });
      dialog.showModal();
    });
    return question;
  };
}
