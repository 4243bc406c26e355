"""Runs of few steps, on messages that the policy cannot learn from."""

import json
from pathlib import Path

import pytest
from command_line import run_here

from april_rl.run.tracking import figures


@pytest.mark.slow
def test_a_short_run_warns_about_its_prompts_and_shows_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when a run that learns nothing reports that only at its end, or keeps no samples."""
    rows = (
        {
            "messages": [{"role": "user", "content": f"What is {n} Plus 2000?"}],
            "answer": str(n + 2000),
        }
        for n in range(20)
    )
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    run_here(
        None,
        tmp_path / "run",
        *("+recipe=tiny_cpu", "~evaluation.sets.held_out"),
        *("data.path=chats.jsonl", "data.prompt_column=messages", "data.template=chat"),
        *("trainer.num_steps=3", "trainer.num_groups=2", "rollout.group_size=2"),
        *("rollout.max_response_tokens=16", "learner.max_tokens=256"),
    )
    printed = capsys.readouterr().out
    assert "of these prompts are unknown to the model, which reads chats.jsonl:1 as" in printed
    assert "'<unk>hat is 0 <unk>lus 2000<unk>'" in printed
    lines = printed.splitlines()
    header = lines.index(figures.HEADING)
    assert lines[header + 1] == figures.LEGEND
    assert [line.split()[0] for line in lines[header + 2 : header + 5]] == ["1", "2", "3"]
    assert lines[header + 5].startswith("No group has a signal since step 1: ")
    for folder, suffix in (("samples", "jsonl"), ("timeline", "json")):
        for step in (1, 3):
            assert (tmp_path / "run" / folder / f"step_{step:05d}.{suffix}").is_file()
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("Samples of step 1<") == page.count("Samples of step 3<") == 1
    assert "reward 0.00" in page
