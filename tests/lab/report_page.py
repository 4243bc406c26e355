"""Parse a report page."""

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.specs: dict[str, dict] = {}
        self.text = ""
        self._chart: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._chart = dict(attrs).get("data-chart") if tag == "script" else None

    def handle_data(self, data):
        if self._chart:
            self.specs[self._chart] = json.loads(data)
            self._chart = None
        self.text += data
