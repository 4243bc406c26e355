"""The reward model: scores equal a direct forward pass, and some responses have no score."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reward_pools import CONTEXT
from tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, character_tokenizer, write_tiny_qwen3
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification

from april_rl.task.rewards.builtin.reward_model import RewardModel, build, load_reward_model

CHAT_TEMPLATE = "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
RESPONSES = ["It is 2.", "It is certainly 3, because of what I said before.", "2"]


def write_classifier(
    path: Path,
    *,
    num_labels: int = 1,
    family: str = "qwen3",
    pad_token_id: int | None = PAD_ID,
    pad_token: str | None = "<pad>",
    padding_side: str = "right",
) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
        pad_token_id=pad_token_id,
        num_labels=num_labels,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    tokenizer = character_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = pad_token, padding_side
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def model(folder: Path) -> RewardModel:
    return load_reward_model(path=str(folder), batch_size=2)


def direct(folder: Path, *texts: str) -> list[float]:
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = character_tokenizer()
    tokenized = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        return [loaded(input_ids=torch.tensor([ids])).logits.item() for ids in tokenized]


def scores(model: RewardModel, responses: list[str], **more: object) -> list[float | None]:
    num = len(responses)
    return model.score(["1 + 1?"] * num, responses, ["2"] * num, **more)


@pytest.mark.parametrize(("family", "padding_side"), [("llama", "left"), ("qwen3", "right")])
@pytest.mark.parametrize(
    ("pad_token_id", "pad_token"),
    [
        (None, "<eos>"),
        (None, None),
        (None, "<pad>"),
        (EOS_ID, "<eos>"),
        (PAD_ID, "<pad>"),
        (-1, None),
    ],
)
def test_every_text_gets_the_score_that_the_model_itself_gives_it(
    tmp_path: Path, family: str, padding_side: str, pad_token_id: int | None, pad_token: str | None
) -> None:
    """Fails when the tokenizer's padding token becomes the model's: if a text ends with that token,
    the logit of another token is read.
    """
    write_classifier(
        tmp_path,
        family=family,
        pad_token_id=pad_token_id,
        pad_token=pad_token,
        padding_side=padding_side,
    )
    for template, begin, end in (
        ("chat", "<bos>user: 1 + 1?<eos><bos>assistant: ", "<eos>"),
        ("{prompt}{response}", "1 + 1?", ""),
    ):
        expected = direct(tmp_path, *(begin + response + end for response in RESPONSES))
        found = load_reward_model(path=str(tmp_path), batch_size=2, template=template)
        assert scores(found, RESPONSES) == pytest.approx(expected, abs=1e-5)
        found = replace(found, batch_size=8)
        assert scores(found, RESPONSES) == pytest.approx(expected, abs=1e-5)


def test_the_score_is_that_of_the_last_token(tmp_path: Path) -> None:
    write_classifier(tmp_path, pad_token_id=None, pad_token="<eos>")
    model = load_reward_model(path=str(tmp_path))
    text = "<bos>user: 1 + 1?<eos><bos>assistant: 2<eos>"
    token_ids = character_tokenizer()(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        hidden = model.model.model(input_ids=torch.tensor([token_ids])).last_hidden_state
        logits = model.model.score(hidden)[0, :, 0]
    assert token_ids[-1] == EOS_ID
    assert scores(model, ["2", RESPONSES[1]])[0] == pytest.approx(logits[-1].item(), abs=1e-5)
    assert abs(logits[-1] - logits[-2]) > 0.1


def test_the_sigmoid_uses_the_same_score(model: RewardModel) -> None:
    logit = scores(model, ["2"])[0]
    value = scores(replace(model, sigmoid=True), ["2"])[0]
    assert value == pytest.approx(torch.tensor(logit).sigmoid().item())


def test_concat_and_custom_templates_build_the_expected_text(
    folder: Path, model: RewardModel
) -> None:
    joined = scores(replace(model, template="concat"), ["a</think>2"])
    assert joined == pytest.approx(direct(folder, "1 + 1?a</think>2"), abs=1e-5)
    own = scores(replace(model, template="Q {prompt} A {response}"), ["a</think> {prompt}"])
    assert own == pytest.approx(direct(folder, "Q 1 + 1? A {prompt}"), abs=1e-5)


@pytest.mark.parametrize("added", ["<bos> $A", "$A <eos>", "<bos> $A <eos>"])
@pytest.mark.parametrize(
    "template", ["<bos>Q {prompt} A {response}<eos>", "Q {prompt} A {response}", "{response}<eos>"]
)
def test_a_template_with_the_tokens_that_the_tokenizer_adds_has_them_once(
    folder: Path, model: RewardModel, added: str, template: str
) -> None:
    tokenizer = character_tokenizer()
    special = [("<bos>", BOS_ID), ("<eos>", EOS_ID)]
    rule = TemplateProcessing(single=added, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = rule
    text = added.replace(" ", "").replace("$A", template).format(prompt="1 + 1?", response="2")
    once = text.replace("<bos><bos>", "<bos>").replace("<eos><eos>", "<eos>")
    found = scores(replace(model, template=template, tokenizer=tokenizer), ["2"])
    assert found == pytest.approx(direct(folder, once), abs=1e-5)


def test_prompt_column_replaces_the_prompt_that_the_model_scores(
    folder: Path, model: RewardModel
) -> None:
    question = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "1 + 1?"}]
    text = "<bos>system: Brief.<eos><bos>user: 1 + 1?<eos><bos>assistant: 2<eos>"
    assert scores(model, ["2"], questions=[question]) == pytest.approx(
        direct(folder, text), abs=1e-5
    )


def test_a_prompt_in_a_chat_template_is_not_put_into_another_template(model: RewardModel) -> None:
    with pytest.raises(ValueError, match=r"contains <\|im_start\|>.*prompt_column"):
        model.score(["<|im_start|>user\n1 + 1?"], ["2"], ["2"])


def test_a_text_that_is_too_long_gives_no_score_and_the_others_are_scored(
    model: RewardModel,
) -> None:
    short = replace(model, max_tokens=40)
    values = scores(short, ["2", "2" * 40, "3"])
    assert values[1] is None
    assert None not in (values[0], values[2])


def test_a_logit_that_is_not_finite_gives_no_score(folder: Path) -> None:
    model = load_reward_model(path=str(folder))
    model.model.score.weight.data.fill_(torch.nan)
    assert scores(model, ["2"]) == [None]


def test_a_reward_process_gets_the_model_and_a_column(folder: Path) -> None:
    built = build(CONTEXT, path=str(folder), prompt_column="problem", max_tokens=50)
    assert built.columns == ("problem",)
    text = "<bos>user: 1 + 1?<eos><bos>assistant: 2<eos>"
    values = built.call(["", ""], ["2", "2" * 60], ["", ""], problem=["1 + 1?"] * 2)
    assert values == [pytest.approx(direct(folder, text)[0], abs=1e-5), None]
    assert "more than args.max_tokens=50" in built.last_failure()


def test_several_labels_are_refused(tmp_path: Path) -> None:
    write_classifier(tmp_path, num_labels=2)
    with pytest.raises(ValueError, match="has 2 labels"):
        load_reward_model(path=str(tmp_path))


def test_a_language_model_without_a_head_is_refused(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_labels": 1}))
    with pytest.raises(ValueError, match=r"does not hold score\.weight"):
        load_reward_model(path=str(tmp_path), template="concat")


@pytest.mark.parametrize("template", ["no placeholder", "chat"])
def test_a_template_that_cannot_work_is_refused(template: str, tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="template"):
        load_reward_model(path=str(tmp_path), template=template)
