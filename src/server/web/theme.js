/* The colour scheme that was chosen, before the first paint: the page would blink otherwise. */
(() => {
  try {
    const theme = localStorage.getItem("deepinfer.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    /* Without storage the system's scheme holds. */
  }
})();
