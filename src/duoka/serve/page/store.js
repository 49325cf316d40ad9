// What the browser keeps. Settings stay; the key and the conversation end with the tab.
// A browser may forbid storage or be out of room, and the page works on without.

const PREFIX = "duoka.";

function read(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(PREFIX + name));
  } catch {
    return null;
  }
}

function write(storage, name, value) {
  try {
    if (value === null) window[storage].removeItem(PREFIX + name);
    else window[storage].setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = {
  read: () => ({
    system: "", temperature: null, maxTokens: null, thinking: null, ...read("localStorage", "settings"),
  }),
  write: (value) => write("localStorage", "settings", value),
};

export const language = {
  read: () => read("localStorage", "language"),
  write: (value) => write("localStorage", "language", value),
};

// Not JSON: early.js reads it too, and shall stay three lines.
export function keepTheme(theme) {
  try {
    localStorage.setItem(PREFIX + "theme", theme);
  } catch {
    // Then it lasts until the page is left.
  }
}

export const key = {
  read: () => read("sessionStorage", "key"),
  write: (value) => write("sessionStorage", "key", value),
};

export const conversation = {
  read: () => read("sessionStorage", "conversation") ?? [],
  // Large images may be more than a browser has room for; then an older one must not come back.
  write: (turns) => {
    const kept = write("sessionStorage", "conversation", turns.length ? turns : null);
    return kept || write("sessionStorage", "conversation", null);
  },
};

export function forgetEverything() {
  settings.write(null);
  key.write(null);
  conversation.write([]);
}
