// What Sphinx and Furo leave out for readers with a keyboard or a screen reader.
addEventListener("DOMContentLoaded", () => {
  const each = (selector, change) => document.querySelectorAll(selector).forEach(change);
  each("pre", (code) => { code.tabIndex = 0; }); // wide code can be scrolled with the arrow keys
  each(".sig dl, .sig dd", (part) => part.setAttribute("role", "presentation"));
  each(".sidebar-drawer", (part) => part.setAttribute("aria-label", "Pages"));
  each(".toc-drawer", (part) => part.setAttribute("aria-label", "On this page"));
  if (!document.querySelector("h1")) {
    const title = document.createElement("h1");
    title.textContent = "Search";
    document.querySelector("article").prepend(title);
  }
});
