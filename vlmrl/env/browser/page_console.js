// Runs before a page's own scripts. Each console message and uncaught error would go through the driver that all episodes share, and
// be read by nobody: they are dropped.
(() => {
  for (const name of Object.keys(console))
    if (typeof console[name] === "function" && name !== "createTask") console[name] = () => {};
  console.context = () => console;
  for (const kind of ["error", "unhandledrejection"]) addEventListener(kind, (event) => event.preventDefault());
})();
