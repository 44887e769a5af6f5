"""The parts of a page: its head, sections, tables."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from xml.etree.ElementTree import Element, SubElement, tostring

Cells = Sequence[Sequence[str]]
"""The rows of a table, the head first."""


class Page:
    """One HTML page without anything outside of it.

    Parameters
    ----------
    title : str
        Its heading.
    lead : str
        What it says below that.

    Attributes
    ----------
    main : Element
        Where sections go.
    """

    def __init__(self, title: str, lead: str) -> None:
        self._html = Element("html", {"lang": "en"})
        head = SubElement(self._html, "head")
        SubElement(head, "meta", {"charset": "utf-8"})
        view = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
        SubElement(head, "meta", view)
        SubElement(head, "meta", {"name": "color-scheme", "content": "light dark"})
        SubElement(head, "title").text = title
        style = files("sleepbackends.pages").joinpath("page.css").read_text(encoding="utf-8")
        SubElement(head, "style").text = style
        self.main = SubElement(SubElement(self._html, "body"), "main")
        SubElement(self.main, "h1").text = title
        SubElement(self.main, "p", {"class": "lead"}).text = lead

    def text(self) -> str:
        """Return the page as it is written to a file."""
        return "<!doctype html>\n" + tostring(self._html, encoding="unicode", method="html") + "\n"


def add_section(main: Element, title: str) -> Element:
    """Begin a section with a heading."""
    section = SubElement(main, "section")
    SubElement(section, "h2").text = title
    return section


def add_table(parent: Element, cells: Cells, name: str) -> None:
    """Add a table of a class; a head of empty cells is left out."""
    around = SubElement(parent, "div", {"class": "scroll", "tabindex": "0"})
    table = SubElement(around, "table", {"class": name})
    head, *body = cells
    if any(head):
        row = SubElement(SubElement(table, "thead"), "tr")
        for cell in head:
            SubElement(row, "th", {"scope": "col"}).text = cell
    of_body = SubElement(table, "tbody")
    for first, *rest in body:
        row = SubElement(of_body, "tr")
        SubElement(row, "th", {"scope": "row"}).text = first
        for cell in rest:
            SubElement(row, "td").text = cell
