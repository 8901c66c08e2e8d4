// What Sphinx and Furo leave out for readers with a keyboard or a screen reader.
addEventListener("DOMContentLoaded", () => {
  const each = (selector, change) => document.querySelectorAll(selector).forEach(change);
  each("pre, .table-wrapper", (wide) => { wide.tabIndex = 0; }); // arrow keys can scroll them
  each(".sig dl, .sig dd", (part) => { // the lines of a signature are no definitions
    const line = document.createElement("span");
    line.className = `sig-${part.tagName.toLowerCase()}`;
    line.append(...part.childNodes);
    part.replaceWith(line);
  });
  each(".sidebar-drawer", (part) => part.setAttribute("aria-label", "Pages"));
  each(".toc-drawer", (part) => part.setAttribute("aria-label", "On this page"));
  if (!document.querySelector("h1")) {
    const title = document.createElement("h1");
    title.textContent = "Search";
    document.querySelector("article").prepend(title);
  }
});
