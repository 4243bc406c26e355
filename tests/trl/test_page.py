"""docs/trl.md: the collector under a trainer and a generator of one's own."""

import re

from source_tree import ROOT


def test_the_collector_runs_with_a_generator_that_is_no_engine(capsys):
    """Fails when the ports change and the page does not."""
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[-1]
    names = {"__name__": "dice"}
    exec(compile(code, "docs/trl.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(step) for step in range(5) for _ in range(4)]
    assert any(re.search(r"\b0, 1\b", line) for line in lines), "a sample of two versions"
