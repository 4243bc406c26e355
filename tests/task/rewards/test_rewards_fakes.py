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
FAKES = {
    "cases: right": ("print(2 * int(input()))", 1.0),
    "cases: exit": ("import os; os._exit(0)", 0.0),
    "cases: one answer": ("print(4)", 0.5),
    "cases: all answers": ("print(4); print(6)", 0.0),
    "cases: look for the expected output in memory": (
        "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'output' in o:\n"
        "        print(o['output']); break",
        0.0,
    ),
    "cases: report to every descriptor": (TOKEN, 0.0),
    "asserts: right": (RIGHT, 1.0),
    "asserts: right, with any names": (ORDINARY_NAMES, 1.0),
    "asserts: exit": ("import os; os._exit(0)", 0.0),
    "asserts: SystemExit": (f"{RIGHT}raise SystemExit", 0.0),
    "asserts: report without a token": (
        f"import os\nfor d in range(3, 64):\n    try: os.write(d, b'0\\n4\\n5\\n')\n"
        f"    except OSError: pass\n{WRONG}",
        0.0,
    ),
    "asserts: replace the test runner": (
        f"import sys\nsys.modules['april_rl.jail.jail']._is_run = print\n{WRONG}",
        0.0,
    ),
    "asserts: replace the test runner by way of __main__": (
        "import __main__\n__main__.main.__globals__['_is' + '_run'] = lambda *a: True\n" + WRONG,
        0.0,
    ),
    "asserts: replace exec": (f"import builtins\nbuiltins.exec = lambda *a: None\n{WRONG}", 0.0),
    "asserts: replace enumerate": (
        "import builtins\nbuiltins.enumerate = lambda tests: [(n, ('', 1)) for n in range(9)]\n"
        + WRONG,
        0.0,
    ),
    "asserts: learn the token from the first test that passes": (
        "import os\nwrite = os.write\nos.write = lambda number, line: [\n"
        "    write(number, line[:65] + b'%d\\n' % n) for n in range(99)\n]\n"
        "def double(x):\n    return 4",
        0.5,
    ),
    "asserts: look for the test runner": (FIND_JAIL + WRONG, 0.0),
    "asserts: the token from the frames": (TOKEN + WRONG, 0.0),
    "asserts: always equal": (EQUAL, 0.0),
    "asserts: a thread goes on": (
        RIGHT + "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()",
        1.0,
    ),
}


@pytest.mark.parametrize("name", FAKES)
def test_attempts_to_fake_a_share_get_their_expected_reward(name: str) -> None:
    program, share = FAKES[name]
    tests = CASES if name.startswith("cases") else ASSERTS
    code = Code(sandbox=Sandbox(level="none"), value="share", timeout_s=10.0, limit_s=60.0)
    assert code.score(f"```python\n{program}\n```", tests) == share
