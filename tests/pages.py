"""A page read as its elements, for tests of what is on it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

from vivace.answers.answer import Answer
from vivace.answers.page import page_of

_VOID = {"meta", "img", "wbr", "input", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def __iter__(self) -> Iterator["Element"]:
        for child in self.children:
            yield child
            yield from child

    def all(self, tag: str, class_: str = "") -> list["Element"]:
        """Return the elements of a tag, and of a class if one is given."""
        return [
            e
            for e in self
            if e.tag == tag and (not class_ or class_ in e.attributes.get("class", "").split())
        ]


class Page(HTMLParser):
    """A rendered page: its elements with their attributes, and the text of each of them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(html)
        assert self._open == [self.root], "an element is not closed"

    @classmethod
    def of(cls, answer: Answer) -> "Page":
        return cls(page_of(answer))

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        element = Element(tag, {k: v or "" for k, v in attrs})
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop().tag == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open[-1].tag not in {"style", "script"}:
            for element in self._open:
                element.text += data

    def all(self, tag: str, class_: str = "") -> list[Element]:
        return self.root.all(tag, class_)

    @property
    def text(self) -> str:
        """The text without the marks of where a line may end."""
        return self.root.text.replace("\N{WORD JOINER}", "")
