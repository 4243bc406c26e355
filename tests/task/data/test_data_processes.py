"""The processes that tokenize a large table, and signals to the process that waits for them."""

import signal

import datasets
from word_tokenizer import hf_tokenizer

from april_rl.config.task import PromptSetConfig
from april_rl.task.data.prompts import load_prompts
from april_rl.task.data.tokenizer import load_tokenizer


def test_sigterm_ends_processes_that_tokenize_although_this_process_handles_it(
    tmp_path, monkeypatch
):
    """Fails when they inherit the handler: an error in one of them might then wait for another
    forever.
    """
    seen, tokenize = [], datasets.Dataset.map

    def look(*args, **settings):
        seen.append(signal.getsignal(signal.SIGTERM))
        return tokenize(*args, **settings)

    monkeypatch.setattr(datasets.Dataset, "map", look)
    hf_tokenizer().save_pretrained(tmp_path / "words")
    (tmp_path / "data.jsonl").write_text('{"prompt": "one", "answer": "1"}\n')
    chosen = PromptSetConfig(path=str(tmp_path / "data.jsonl"), template="plain")
    tokenizer = load_tokenizer(str(tmp_path / "words"))
    before = signal.signal(signal.SIGTERM, handler := lambda *_: None)
    try:
        load_prompts(chosen, tokenizer, key="data.path", max_prompt_tokens=9)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_DFL]
