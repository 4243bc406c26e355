"""Attempts to fake the share of tests that a program passes, and the reward of each."""

import pytest
from test_rewards_code import CASES

from april_rl.jail.sandbox import Sandbox
from april_rl.task.rewards.builtin.code import Code

ASSERTS = "import math\nimport os\nx = 1\ny = 2\nassert double(2) == 4\nassert double(3) == 6\n"
RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return 0\n"
TOKEN = """
import os, sys
frame, found = sys._getframe(), ""
while frame:
    found = found or frame.f_locals.get("token", "")
    frame = frame.f_back
for descriptor in range(3, 64):
    for number in range(1000):
        try:
            os.write(descriptor, f"{found} {number}\\n".encode())
        except OSError:
            pass
"""
FIND_JAIL = """
import sys
for module in list(sys.modules.values()):
    if hasattr(module, "_is_run"):
        module._is_run = lambda *arguments: True
"""
ORDINARY_NAMES = """
import sys
class Clock:
    def __init__(self):
        self._is_running = False
def double(x):  # half_back of the april_rl_list
    diff_back = pdf_locals = x
    return diff_back + pdf_locals if sys._getframe() else 0
"""
EQUAL = "class Any:\n    __eq__ = lambda *a: True\ndef double(x):\n    return Any()\n"


@pytest.mark.parametrize(
    ("program", "tests", "share"),
    [
        pytest.param("print(2 * int(input()))", CASES, 1.0, id="cases: right"),
        pytest.param("import os; os._exit(0)", CASES, 0.0, id="cases: exit"),
        pytest.param("print(4)", CASES, 0.5, id="cases: one answer"),
        pytest.param("print(4); print(6)", CASES, 0.0, id="cases: all answers"),
        pytest.param(
            "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'output' in o:\n"
            "        print(o['output']); break",
            CASES,
            0.0,
            id="cases: look for the expected output in memory",
        ),
        pytest.param(TOKEN, CASES, 0.0, id="cases: report to every descriptor"),
        pytest.param(RIGHT, ASSERTS, 1.0, id="asserts: right"),
        pytest.param(ORDINARY_NAMES, ASSERTS, 1.0, id="asserts: right, with any names"),
        pytest.param("import os; os._exit(0)", ASSERTS, 0.0, id="asserts: exit"),
        pytest.param(f"{RIGHT}raise SystemExit", ASSERTS, 0.0, id="asserts: SystemExit"),
        pytest.param(
            f"import os\nfor d in range(3, 64):\n    try: os.write(d, b'0\\n4\\n5\\n')\n"
            f"    except OSError: pass\n{WRONG}",
            ASSERTS,
            0.0,
            id="asserts: report without a token",
        ),
        pytest.param(
            f"import sys\nsys.modules['april_rl.jail.jail']._is_run = print\n{WRONG}",
            ASSERTS,
            0.0,
            id="asserts: replace the test runner",
        ),
        pytest.param(
            "import __main__\n__main__.main.__globals__['_is' + '_run'] = lambda *a: True\n"
            + WRONG,
            ASSERTS,
            0.0,
            id="asserts: replace the test runner by way of __main__",
        ),
        pytest.param(
            f"import builtins\nbuiltins.exec = lambda *a: None\n{WRONG}",
            ASSERTS,
            0.0,
            id="asserts: replace exec",
        ),
        pytest.param(
            "import builtins\nbuiltins.enumerate = lambda tests: [(n, ('', 1)) for n in range(9)]\n"
            + WRONG,
            ASSERTS,
            0.0,
            id="asserts: replace enumerate",
        ),
        pytest.param(
            "import os\nwrite = os.write\nos.write = lambda number, line: [\n"
            "    write(number, line[:65] + b'%d\\n' % n) for n in range(99)\n]\n"
            "def double(x):\n    return 4",
            ASSERTS,
            0.5,
            id="asserts: learn the token from the first test that passes",
        ),
        pytest.param(FIND_JAIL + WRONG, ASSERTS, 0.0, id="asserts: look for the test runner"),
        pytest.param(TOKEN + WRONG, ASSERTS, 0.0, id="asserts: the token from the frames"),
        pytest.param(EQUAL, ASSERTS, 0.0, id="asserts: always equal"),
        pytest.param(
            RIGHT
            + "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()",
            ASSERTS,
            1.0,
            id="asserts: a thread goes on",
        ),
    ],
)
def test_attempts_to_fake_a_share_get_their_expected_reward(
    program: str, tests: object, share: float
) -> None:
    code = Code(sandbox=Sandbox(level="none"), value="share", timeout_s=10.0, limit_s=60.0)
    assert code.score(f"```python\n{program}\n```", tests) == share
