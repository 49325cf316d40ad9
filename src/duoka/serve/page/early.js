// Runs before the first paint, so that a chosen theme doesn't flash by in the other one.
try {
  const theme = localStorage.getItem("duoka.theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden: the system's theme, then.
}
