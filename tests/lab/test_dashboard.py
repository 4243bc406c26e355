"""The dashboards: every metric has a panel or a reason for none, and W&B's types accept them."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import wandb_workspaces.workspaces as ws

from april_rl.lab.commands import dashboard as command
from april_rl.lab.dashboards.dashboard import plain, run_dashboard, sweep_dashboard
from april_rl.lab.dashboards.panels import LEFT_OUT, SECTIONS
from april_rl.tracking import keys

SHOWN = {key for section in SECTIONS for panel in section.panels for key in panel.keys}
BOTH = pytest.mark.parametrize("build", [run_dashboard, sweep_dashboard])


def test_every_described_metric_has_a_panel_or_a_reason_for_none():
    described = {key.key for key in keys.KEYS}
    without = {key for key in described if any(keys.matches(left, key) for left in LEFT_OUT)}
    assert described - SHOWN - without == set()
    assert SHOWN & without == set()


def test_every_panel_shows_metrics_that_are_described():
    described = {key.key for key in keys.KEYS}
    axes = {panel.axis for section in SECTIONS for panel in section.panels}
    assert (SHOWN | axes - {"step"}) - described == set()
    assert [left for left in LEFT_OUT if not any(keys.matches(left, k) for k in described)] == []


def test_a_dashboard_opens_with_eight_panels_and_the_others_closed():
    first, *others = sections_of(run_dashboard)
    assert len(first["panels"]) == len(keys.FIRST_LOOK) == 8
    assert tuple(panel.keys[0] for panel in SECTIONS[0].panels) == keys.FIRST_LOOK
    assert first["isOpen"]
    assert not any(section["isOpen"] for section in others)


def sections_of(build) -> list[dict]:
    spec = plain(build(entity="someone", project="trial"))
    return spec["section"]["panelBankConfig"]["sections"]


@BOTH
def test_a_dashboard_is_the_same_each_time_and_survives_the_types_of_wandb(build):
    made = build(entity="someone", project="trial")
    assert plain(made) == plain(build(entity="someone", project="trial"))
    assert plain(ws.Workspace._from_model(made._to_model())) == plain(made)


class Server(BaseHTTPRequestHandler):
    """Answers as W&B does to a login and to a view that is saved, and keeps what it was sent."""

    sent: list[dict]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.sent.append(body)
        view = {"view": {"id": "1", "name": "abc"}, "inserted": True}
        viewer = {"id": "2", "username": "someone", "entity": "someone", "flags": "{}"}
        data = {"upsertView": view, "viewer": viewer, "serverInfo": None}
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_the_command_saves_a_dashboard_on_a_server(tmp_path):
    """Run in a new process, since W&B reads its address and key only once."""
    handler = type("Kept", (Server,), {"sent": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        environment = {**os.environ, "HOME": str(tmp_path), "WANDB_BASE_URL": address}
        environment["WANDB_API_KEY"] = "0" * 40
        arguments = [sys.executable, "-m", "april_rl", "dashboard", "entity=someone", "kind=sweep"]
        done = subprocess.run(
            arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "dashboard: " in done.stdout
    (saved,) = [body["variables"] for body in handler.sent if "upsertView" in body["query"]]
    assert (saved["entityName"], saved["projectName"]) == ("someone", "april_rl")
    assert saved["displayName"] == "april_rl sweep"
    sections = json.loads(saved["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["last value over α", "course by α"]


def test_the_command_prints_a_dashboard_without_a_login(capsys):
    assert command.main(["kind=run", "--print"]) == 0
    assert json.loads(capsys.readouterr().out) == plain(
        run_dashboard(entity="", project="april_rl")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give entity=NAME"),
        (["entity=a", "kind=report"], "kind=report must be run or sweep"),
        (["entitty=a"], "entitty=a is not an argument"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err
