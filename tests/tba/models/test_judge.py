from pathlib import Path

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_folder, tiny_tokenizer
from tba.errors import ConfigError
from tba.models.judge import Judge
from tests.support.models.judges import classifier

TEXTS = ["12+34=46", "1", "a much longer text than the others are, which ends at last", "12+34=46?"]


@pytest.mark.parametrize(("kind", "labels"), [("decoder", 1), ("encoder", 2)])
def test_what_a_text_is_judged_with_does_not_change_its_logits(kind: str, labels: int, tmp_path: Path):
    judge = Judge.load("task.options.judge", classifier(tmp_path, kind, labels), device="cpu")
    together = judge.logits(TEXTS)
    assert together.shape == (len(TEXTS), labels)
    alone = torch.cat([judge.logits([text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert len(together.unique(dim=0)) == len(TEXTS)
    small = Judge(judge.model, judge.tokenizer, tokens_per_batch=10).logits(TEXTS)
    torch.testing.assert_close(small, together, atol=1e-5, rtol=1e-5)


def test_a_reward_model_reads_the_last_token_of_a_row_also_where_it_is_the_end_of_a_text(tmp_path: Path):
    judge = Judge.load("task.options.judge", classifier(tmp_path, "decoder", 1), device="cpu")
    ended = judge.logits(["12+34=46<eos>", TEXTS[2]])
    plain = judge.logits(["12+34=46", TEXTS[2]])
    assert abs(float(ended[0] - plain[0])) > 1e-3


def test_a_judge_may_read_with_the_tokenizer_of_another_and_without_one_for_padding_misses_a_final_end(tmp_path: Path):
    folder, other = classifier(tmp_path / "judge", "decoder", 1), tmp_path / "tokenizer"
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(other)
    own = Judge.load("task.options.judge", folder, device="cpu")
    judge = Judge.load("task.options.judge", folder, tokenizer_path=other, device="cpu")
    torch.testing.assert_close(judge.logits(TEXTS), own.logits(TEXTS), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(judge.logits(["12+34=46<eos>"]), own.logits(["12+34=46"]), atol=1e-5, rtol=1e-5)


def test_a_text_is_cut_where_it_is_asked_to_be(tmp_path: Path):
    judge = Judge.load("task.options.judge", classifier(tmp_path, "decoder", 1), device="cpu")
    torch.testing.assert_close(judge.logits([TEXTS[2]], max_tokens=6), judge.logits([TEXTS[2][:6]]))


def test_a_model_that_judges_nothing_is_refused_by_the_name_of_its_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task.options.judge: .*ForSequenceClassification it has no score"):
        Judge.load("task.options.judge", tiny_folder(tmp_path), device="cpu")


def test_a_folder_without_a_model_is_refused_by_the_name_of_its_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"task.options.judge: cannot load a model from '{tmp_path}'"):
        Judge.load("task.options.judge", tmp_path, device="cpu")


def test_a_device_that_is_not_there_is_refused_by_the_name_of_the_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task\.options\.judge_device: no such kind of device, got 'gpu'"):
        Judge.load("task.options.judge", tmp_path, device="gpu")
    with pytest.raises(ConfigError, match=r"task\.options\.device: no such kind of device, got 'gpu'"):
        Judge.load("task.options.judge", tmp_path, device="gpu", device_setting="task.options.device")
