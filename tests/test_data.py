import json
import platform

import pytest
from datasets import Dataset, DatasetDict

from async_rlhf.config import DataConfig, UserError
from async_rlhf.data import Encoder, PromptStream, load_prompts, load_split
from async_rlhf.docstrings import KNOWN_FINGERPRINTS, docstrings, fingerprint

CHAT = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def test_stream_shows_every_row_once_an_epoch_in_a_new_order():
    stream = PromptStream([[i] for i in range(10)], seed=1)
    epochs = [[prompt.row for prompt in stream.take(start, 10)] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_stream_is_a_function_of_position_and_batches_may_cross_epochs():
    stream, other = (PromptStream([[i] for i in range(7)], seed=3) for _ in range(2))
    whole = stream.take(0, 40)
    assert [prompt for start in range(0, 40, 4) for prompt in other.take(start, 4)] == whole
    assert other.take(22, 5) == whole[22:27]  # where a resumed run stands, whatever was asked for before


def test_a_data_set_smaller_than_a_batch_works():
    assert sorted(prompt.row for prompt in PromptStream([[0], [1]], seed=0).take(0, 6)) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "folder"])
def test_every_local_form_loads(tmp_path, form):
    rows = Dataset.from_list([{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(5)])
    path = tmp_path / f"data.{form}"
    if form == "folder":
        DatasetDict({"train": rows}).save_to_disk(path)
    elif form == "csv":
        rows.to_csv(path)
    elif form == "parquet":
        rows.to_parquet(path)
    else:
        rows.to_json(path)
    config = DataConfig(dataset_name=str(path), eval_split="train[80%:]", max_train_samples=3)
    assert load_split(config, "train")["prompt"][:] == ["p0", "p1", "p2"]
    assert load_split(config, "eval")["completion"][:] == ["c4"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "./absent.jsonl"}, "no such file"),
        ({"prompt_column": "query"}, "no column query; it has text, answer, topic"),
        ({"prompt_template": "{text} {more}"}, "no column more"),
        ({"train_split": "test"}, "test"),
        ({"max_prompt_length": 2}, "every prompt is over max_prompt_length 2"),
        ({"max_prompt_length": 9, "overlong_prompts": "error"}, "prompts over max_prompt_length 9, rows ["),
    ],
)
def test_bad_data_settings_name_what_to_change(prompts_file, tokenizer, settings, message):
    config = DataConfig(**{"dataset_name": str(prompts_file), "prompt_column": "text", **settings})
    with pytest.raises(UserError) as caught:
        load_prompts(config, Encoder(config, tokenizer), "train")
    assert message in str(caught.value)


def test_an_empty_file_is_an_error(tmp_path, tokenizer):
    (tmp_path / "empty.jsonl").write_text("")
    config = DataConfig(dataset_name=str(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="empty.jsonl"):
        load_split(config, "train")


def test_overlong_prompts_are_dropped_and_counted(prompts_file, tokenizer, capsys):
    config = DataConfig(dataset_name=str(prompts_file), prompt_column="text", max_prompt_length=9)
    data = load_prompts(config, Encoder(config, tokenizer), "train")
    assert data.dropped + len(data) == 48
    assert f"train prompts: {len(data)}, {data.dropped} over max_prompt_length 9 dropped" in capsys.readouterr().out
    assert 0 < len(data) < 48
    assert all(tokenizer(row["text"])["input_ids"] == ids for row, ids in zip(data.rows, data.ids, strict=True))


def test_templates_build_prompt_and_completion(tokenizer):
    config = DataConfig(prompt_template="T: {text}\nA:", completion_template=" {answer}")
    encoder, row = Encoder(config, tokenizer), {"text": "a cat", "answer": "yes"}
    assert (encoder.prompt_text(row), encoder.completion_text(row)) == ("T: a cat\nA:", " yes")
    assert encoder.completion_ids(row)[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(encoder.completion_ids(row)[:-1]) == " yes"


def test_conversations_go_through_the_chat_template_with_one_bos(tokenizer):
    """The template writes BOS and so does the tokenizer: one must be left, and an eos inside the prompt stays."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    chat = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<pad>", eos_token="<eos>", pad_token="<eos>")
    chat.chat_template = CHAT
    config = DataConfig(prompt_column="messages", system_prompt="Be brief.")
    encoder = Encoder(config, chat)
    row = {"messages": [{"role": "user", "content": "The cat<eos>"}]}
    assert encoder.prompt_text(row) == "<pad><system>Be brief.<user>The cat<eos><assistant>"
    ids = encoder.prompt_ids(row)
    assert ids.count(0) == 1
    assert ids.count(chat.eos_token_id) == 1
    as_text = Encoder(DataConfig(prompt_column="q", chat_template=True), chat)
    assert as_text.prompt_text({"q": "Hi"}) == "<pad><user>Hi<assistant>"


def test_null_prompts_are_named(tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": None}) + "\n")
    config = DataConfig(dataset_name=str(tmp_path / "rows.jsonl"))
    with pytest.raises(UserError, match="column 'prompt': a row is null"):
        load_prompts(config, Encoder(config, tokenizer), "train")
    config.prompt_template = "Say: {prompt}"
    with pytest.raises(UserError, match="template 'Say: {prompt}': column prompt of a row is null"):
        load_prompts(config, Encoder(config, tokenizer), "train")


def test_docstrings_have_the_recorded_fingerprint():
    known = KNOWN_FINGERPRINTS.get(platform.python_version())
    if known is None:
        pytest.skip(f"no fingerprint is recorded for Python {platform.python_version()}")
    assert fingerprint() == known


def test_docstrings_are_many_real_and_split_by_file():
    splits = docstrings()
    assert len(splits["train"]) > 10_000
    assert len(splits["validation"]) > 800
    assert not set(splits["train"]["module"]) & set(splits["validation"]["module"])
    assert not set(splits["train"]["summary"]) & set(splits["validation"]["summary"])
    row = splits["train"][0]
    assert row["prompt"] == f"{row['code']}\n# TL;DR:"
    assert row["completion"] == f" {row['summary']}"
    assert row["summary"] not in row["code"]
