"use strict";
// Sorts the tables of results by the column whose heading is clicked; a second click turns the order round.
// Rows without a value, such as those that were not measured, stay last.
for (const table of document.querySelectorAll("table.sorted")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];

  const valueOf = (row, column) => {
    const value = row.cells[column]?.dataset.value;
    return value === undefined ? null : Number.isNaN(Number(value)) ? value : Number(value);
  };

  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));

  const sort = (column, direction) => {
    const sign = direction === "descending" ? -1 : 1;
    const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, column), number: valueOf(row, 0) }));
    rows.sort((a, b) => {
      if (a.value === null || b.value === null) {
        return (a.value === null) - (b.value === null) || a.number - b.number;
      }
      return sign * compare(a.value, b.value) || a.number - b.number;
    });
    body.append(...rows.map((each) => each.row));
    for (const heading of headings) heading.removeAttribute("aria-sort");
    headings[column].setAttribute("aria-sort", direction);
  };

  headings.forEach((heading, column) => {
    if (!heading.dataset.sort) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const before = heading.getAttribute("aria-sort");
      const turned = before === "ascending" ? "descending" : "ascending";
      sort(column, before ? turned : heading.dataset.sort);
    });
  });
  table.classList.add("sortable");
}
