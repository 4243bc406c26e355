"""A resumed run names the settings that differ from its checkpoint's."""

from pathlib import Path

from april_rl.run.tracking.tracker import config_text
from april_rl.start.assembly.run_directory import changes_since

SAVED = {
    "resume": None,
    "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
    "data": {"sources": {}, "path": "a.jsonl"},
    "runtime": {"num_workers": "auto"},
}


def test_every_changed_setting_is_named_with_both_values(tmp_path: Path) -> None:
    """Fails when a setting that exists on only one side is left out, or a new value of auto is
    reported.
    """
    (tmp_path / "config.yaml").write_text(config_text(SAVED))
    assert changes_since(tmp_path, SAVED) == []
    shown = {
        "resume": "auto",
        "optimizer": {"lr": 3e-4, "weight_decay": 0.0},
        "data": {"sources": {"sums": {"weight": 2.0}}, "path": None},
        "runtime": {"num_workers": 1},
    }
    assert changes_since(tmp_path, shown) == [
        "optimizer.lr from 0.0001 to 0.0003",
        "data.sources.sums from null to {'weight': 2.0}",
        "data.path from a.jsonl to null",
    ]
