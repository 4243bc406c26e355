"""W&B dashboards: their panels, what the server is sent, and what the command refuses."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import wandb_workspaces.workspaces as ws
from wandb_workspaces.workspaces.internal import View, WorkspaceViewspec

from april_rl.__main__ import main
from april_rl.lab.dashboards.dashboard import KINDS, dashboard, spec
from april_rl.run.tracking import keys

ALPHA = "rollout.value.over_sampling_factor"  # as W&B stores a setting in a section


def made(kind: str) -> tuple[list[dict], list[dict]]:
    section = json.loads(spec(dashboard(kind, entity="someone", project="trial")))["section"]
    panels = (panel for each in section["panelBankConfig"]["sections"] for panel in each["panels"])
    return section["runSets"][0]["grouping"], [panel["config"] for panel in panels]


@pytest.mark.parametrize("kind", KINDS)
def test_every_panel_shows_a_metric_that_a_run_logs(kind):
    known = {key.key for key in keys.KEYS}
    for panel in made(kind)[1]:
        assert panel["chartTitle"] in known
        if "metricRegex" in panel:
            assert panel["metricRegex"] == "^eval/[^/]+/avg_at_k$"
        else:
            assert panel["metrics"] == [panel["chartTitle"]]


def test_the_view_of_runs_has_the_eight_panels_of_the_first_look():
    grouping, panels = made("run")
    assert tuple(panel["chartTitle"] for panel in panels) == keys.FIRST_LOOK
    assert (len(panels), grouping) == (8, [])
    assert {panel["xAxis"] for panel in panels} == {"step"}


def test_the_view_of_a_sweep_averages_runs_of_equal_over_sampling_factor():
    grouping, panels = made("sweep")
    assert grouping == [{"section": "config", "name": ALPHA}]
    assert {(panel["groupBy"], panel["groupAgg"]) for panel in panels} == {(ALPHA, "mean")}
    assert all(panel["aggregate"] for panel in panels)


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_of_wandb_reads_a_view_back_as_it_was_written(kind):
    text = spec(dashboard(kind, entity="someone", project="trial"))
    read = WorkspaceViewspec.model_validate_json(text)
    view = View(entity="a", project="b", display_name="c", name="d", id="1", spec=read)
    assert without_ids(spec(ws.Workspace._from_model(view))) == without_ids(text)


def without_ids(text: str) -> object:
    """Return a specification without the ids that are drawn at random."""
    return json.loads(
        text, object_hook=lambda d: {k: v for k, v in d.items() if k not in ("__id__", "id")}
    )


class Server(BaseHTTPRequestHandler):
    """Answers as W&B does to a login and to a view that is saved, and keeps what it was sent."""

    sent: list[dict]
    status: int

    def do_POST(self) -> None:
        self.sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        view = {"view": {"id": "1", "name": "abc"}, "inserted": True}
        viewer = {"id": "2", "username": "someone", "entity": "someone", "flags": "{}"}
        answer = json.dumps({"data": {"upsertView": view, "viewer": viewer}}).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def save(folder, *, status: int = 200, key: str = "0" * 40):
    """Run the command against a server, in a new process, since W&B reads its key only once."""
    handler = type("Kept", (Server,), {"sent": [], "status": status})
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        given = {"HOME": str(folder), "WANDB_BASE_URL": address, "WANDB_API_KEY": key}
        done = subprocess.run(
            [sys.executable, "-m", "april_rl", "dashboard", "entity=someone", "kind=sweep"],
            env=kept | {name: value for name, value in given.items() if value},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        server.shutdown()
    return done, address, handler.sent


@pytest.mark.slow
def test_the_command_saves_a_view_on_the_server(tmp_path):
    done, address, sent = save(tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"dashboard: {address}/someone/april_rl?nw=abc" in done.stdout
    (saved,) = [body["variables"] for body in sent if "upsertView" in body["query"]]
    assert (saved["entityName"], saved["projectName"]) == ("someone", "april_rl")
    view = dashboard("sweep", entity="someone", project="april_rl")
    assert without_ids(saved["spec"]) == without_ids(spec(view))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [({"status": 403}, "W&B did not save the dashboard"), ({"key": ""}, "run `wandb login`")],
)
def test_a_view_that_cannot_be_saved_ends_in_one_message(tmp_path, given, words):
    done, _, _ = save(tmp_path, **given)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert words in done.stderr.splitlines()[-1]


def test_the_command_prints_a_view_without_a_key_or_a_network(capsys):
    assert main(["dashboard", "kind=sweep", "--print"]) == 0
    view = dashboard("sweep", entity="", project="april_rl")
    assert without_ids(capsys.readouterr().out) == without_ids(spec(view))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "entity is missing: give entity=NAME"),
        (["entity="], "entity has no value"),
        (["entity=a", "kind=report"], "kind=report is not a kind of dashboard: it must be run or"),
        (["entitty=a"], "entitty=a is not an argument of dashboard; did you mean entity?"),
        (["sweep"], "sweep is not an argument of dashboard; it takes entity, project, kind"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    assert main(["dashboard", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_library_is_named(monkeypatch, capsys):
    monkeypatch.setattr("april_rl.lab.commands.dashboard.find_spec", lambda _: None)
    assert main(["dashboard", "--print"]) == 1
    assert "pip install 'wandb-workspaces" in capsys.readouterr().err
