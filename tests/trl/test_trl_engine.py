"""The calls to TRL's vLLM and its possible answers, without running either of them."""

from types import SimpleNamespace

import pytest
from light_samples import PROMPT
from trl_runs import WITH_TRL

from april_rl.errors import RunError
from april_rl.training.rollout.requests import Request
from april_rl.types import SampleId

pytestmark = [
    *WITH_TRL,
    pytest.mark.filterwarnings("ignore"),  # TRL warns about the version of vLLM
]


class Said:
    """A vLLM engine that returns one token with this log-probability."""

    def __init__(self, logprob):
        self.logprob, self.asked = logprob, []

    def add_request(self, request_id, prompt, params):  # noqa: ARG002
        self.asked.append((request_id, params))

    def step(self):
        said = SimpleNamespace(
            token_ids=[5],
            logprobs=[{5: SimpleNamespace(logprob=self.logprob)}],
            finish_reason="stop",
        )
        return [
            SimpleNamespace(request_id=request_id, outputs=[said], finished=True)
            for request_id, _ in self.asked
        ]


def ask(*, start=0, logprob=-0.5, regex=None, **generation_kwargs):
    """Return the parameters of a request of a sample that has `start` tokens."""
    from april_rl.trl.engine import TrlEngine

    said = Said(logprob)
    generation = SimpleNamespace(
        llm=SimpleNamespace(llm_engine=said),
        generation_kwargs=generation_kwargs,
        structured_outputs_regex=regex,
        repetition_penalty=1.0,
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        min_p=None,
        logprobs=0,
    )
    request = Request(
        sample_id=SampleId(PROMPT.id, 0),
        prompt_token_ids=(1, 2),
        start=start,
        max_tokens=10 - start,
        seed=0,
    )
    TrlEngine(SimpleNamespace(vllm_generation=generation)).advance([request], slots=1, max_steps=1)
    [(_, params)] = said.asked
    return params


def test_structured_outputs_equal_trl_s_and_its_regex_comes_first():
    assert ask().structured_outputs is None
    assert ask(structured_outputs={"regex": "a"}).structured_outputs.regex == "a"
    assert ask(structured_outputs={"regex": "a"}, regex="b").structured_outputs.regex == "b"


def test_a_resumed_sample_gets_the_rest_of_both_limits():
    params = ask(start=3, max_tokens=99, min_tokens=5)
    assert (params.max_tokens, params.min_tokens) == (7, 2)
    assert ask(start=6, min_tokens=5).min_tokens == 0


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_log_probability_that_is_not_finite_ends_the_run_with_a_reason(logprob):
    with pytest.raises(RunError, match=r"log-probability (nan|-inf) to a token"):
        ask(logprob=logprob)
