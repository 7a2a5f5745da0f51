"""Relabelling that is stopped and continued: the parts by themselves, and `relabel_with_rm.py` with existing and with made pairs."""

import json
import sys
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import LLAMA, sentences
from datasets import Dataset, Features, List, Value, load_from_disk
from transformers import AutoConfig, AutoModelForSequenceClassification

import relabel_with_rm
from async_rlhf.config import UserError
from async_rlhf.parts import Parts, digest
from async_rlhf.rewards.model import RewardModel

# Letters as in conftest's reward, every call recorded; a file `trouble` beside it, "<call> <kind>", is used up by the call that it names.
REWARD = """
import os
import signal
from pathlib import Path

CALLS, TROUBLE = Path(__file__).with_name("calls"), Path(__file__).with_name("trouble")


def letters(samples):
    with CALLS.open("a") as file:
        file.write(f"{len(samples)}\\n")
    if TROUBLE.exists():
        call, kind = TROUBLE.read_text().split()
        if len(CALLS.read_text().split()) == int(call):
            TROUBLE.unlink()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "interrupt":
                raise KeyboardInterrupt
            if kind == "nan":
                return [float("nan")] * len(samples)
            raise KeyError("topic")
    return [s.response.count("a") + len(s.response) / 100 for s in samples]
"""


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    return f"{tmp_path}/reward.py:letters"


@pytest.fixture
def relabel(monkeypatch, capsys):
    """Runs the script in this process; returns what it printed."""

    def run(**fields) -> str:
        arguments = ["--dry_run"] if fields.pop("dry_run", False) else []
        arguments += [f"--{name}={value}" for name, value in fields.items()]
        monkeypatch.setattr(sys, "argv", ["relabel_with_rm.py", *arguments])
        capsys.readouterr()
        relabel_with_rm.main()
        return capsys.readouterr().out

    return run


def write_pairs(path, count=10):
    """Rows of two sides; the rejected one is better in every third, and both are the same in the last."""
    rows = [
        {"prompt": f"p{i}", "chosen": "a" * (1 + i % 4), "rejected": "a" * (5 if i % 3 == 0 else 0) + "x", "chosen_model": f"m{i}",
         "rejected_model": None, "chosen_rating": i, "rejected_rating": i + 0.5}
        for i in range(count - 1)
    ]  # fmt: skip
    rows.append({**rows[0], "chosen": "same", "rejected": "same"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(folder):
    dataset = load_from_disk(str(folder))["train"]
    return dataset.features, list(dataset)


def calls(tmp_path):
    """Samples a call; without the search for the sample at which a call raised, one by one."""
    return [size for line in (tmp_path / "calls").read_text().split() if (size := int(line)) > 1]


# -- parts ----------------------------------------------------------------------------------------------------------------------


def test_parts_are_read_in_order_and_the_missing_ones_known(tmp_path):
    parts = Parts(tmp_path / "out.part")
    assert parts.missing(5, 2) == {0: range(0, 2), 1: range(2, 4), 2: range(4, 5)}
    parts.open({"size": 2})
    parts.write(2, [{"n": 4, "text": "line\u2028\r\n \ud800"}])
    parts.write(0, [{"n": 0}, {"n": 1}])
    assert parts.done() == [0, 2] and parts.missing(5, 2) == {1: range(2, 4)}
    parts.write(1, [])
    assert list(parts.read()) == [{"n": 0}, {"n": 1}, {"n": 4, "text": "line\u2028\r\n \ud800"}]


def test_missing_parts_are_filled_and_the_bar_starts_where_they_do(tmp_path, capsys):
    parts = Parts(tmp_path / "out.part")
    parts.open({})
    parts.write(0, [{"n": 0}, {"n": 1}])
    parts.fill(6, 2, lambda items: [{"n": n} for n in items if n > 3], "rows", lambda records: {"first": records[0]["n"]})
    assert list(parts.read()) == [{"n": 0}, {"n": 1}, {"n": 4}, {"n": 5}] and parts.done() == [0, 1, 2]
    bar = capsys.readouterr().err
    assert "2/6 [" in bar and "6/6 [" in bar and " rows/s, first=4]" in bar


def test_a_part_whose_writing_was_cut_short_is_absent(tmp_path):
    parts = Parts(tmp_path / "out.part")
    parts.open({})

    def cut_short():
        yield {"n": 0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parts.write(0, cut_short())
    assert parts.done() == [] and list(parts.read()) == []


def test_parts_of_other_settings_are_refused_by_name(tmp_path):
    parts = Parts(tmp_path / "out.part")
    parts.check({"seed": 1})
    assert not parts.folder.exists()
    parts.open({"seed": 1, "ids": (1, 2), "rows": 3})
    parts.open({"seed": 1, "ids": (1, 2), "rows": 3})
    parts.check({"seed": 1})
    with pytest.raises(
        UserError, match=r"seed: 2 now, 1 when the parts in '.*out\.part' were made; .* delete that folder.* new output_dir"
    ):
        parts.check({"seed": 2})
    with pytest.raises(UserError, match="fresh: 0 now, None when"):
        parts.check({"seed": 1, "fresh": 0})


def test_a_folder_that_is_no_work_folder_is_not_touched(tmp_path):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds no settings\.json"):
        Parts(tmp_path / "out.part").open({})


def test_assembling_again_after_a_stop_gives_the_data_set(tmp_path):
    parts = Parts(tmp_path / "out.part")
    parts.open({})
    parts.write(0, [{"n": 1}, {"n": 2}])
    (parts.folder / "dataset" / "train").mkdir(parents=True)
    (parts.folder / "rows.arrow").write_bytes(b"half")
    parts.assemble(parts.read(), Features(n=Value("float64")), tmp_path / "out")
    features, rows = rows_of(tmp_path / "out")
    assert features == {"n": Value("float64")} and rows == [{"n": 1.0}, {"n": 2.0}]
    assert not parts.folder.exists()


def test_the_digest_is_of_the_values(tmp_path):
    rows = Dataset.from_list([{"x": i} for i in range(2500)])
    rows.save_to_disk(tmp_path / "rows")
    assert (
        digest(rows)
        == digest(load_from_disk(str(tmp_path / "rows")))
        == digest(Dataset.from_list([{"x": -1}, *rows]).select(range(1, 2501)))
    )
    assert digest(rows) != digest(rows.select(range(2499)))
    assert digest(rows) != digest(Dataset.from_list([{"x": float(i)} for i in range(2500)]))


# -- existing pairs ---------------------------------------------------------------------------------------------------------------


def test_a_killed_run_is_continued_to_the_same_data_set(tmp_path, reward, relabel, run_script):
    fields = dict(dataset_name=write_pairs(tmp_path / "pairs.jsonl"), reward_model_path=reward, chunk_size=2)
    printed = relabel(**fields, output_dir=tmp_path / "whole").replace("whole", "cut")
    assert calls(tmp_path) == [4] * 5
    assert "3 of 10 pairs swapped; 1 score the same" in printed and "10 pairs, mean score difference" in printed

    (tmp_path / "trouble").write_text("8 kill")
    cut = [f"--{name}={value}" for name, value in fields.items()] + [f"--output_dir={tmp_path / 'cut'}"]
    run_script("relabel_with_rm.py", *cut, code=-9)
    assert not (tmp_path / "cut").exists()
    assert "2 parts of 2 rows are done in " in relabel(**fields, output_dir=tmp_path / "cut", dry_run=True)

    (tmp_path / "calls").unlink()
    assert relabel(**fields, output_dir=tmp_path / "cut") == printed
    assert calls(tmp_path) == [4] * 3
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert not (tmp_path / "cut.part").exists()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [("raise", KeyError, "topic"), ("nan", ValueError, "score nan for sample 0"), ("interrupt", KeyboardInterrupt, None)],
)
def test_what_is_done_stands_when_the_reward_fails(kind, error, message, tmp_path, reward, relabel):
    fields = dict(dataset_name=write_pairs(tmp_path / "pairs.jsonl"), reward_model_path=reward, chunk_size=4, output_dir=tmp_path / "out")
    (tmp_path / "trouble").write_text(f"2 {kind}")
    with pytest.raises(error, match=message) as caught:
        relabel(**fields)
    assert f"in pairs 4 to 7; the same command continues from '{tmp_path}/out.part'" in caught.value.__notes__
    relabel(**fields)
    assert calls(tmp_path) == [8, 8, 8, 4]
    assert len(rows_of(tmp_path / "out")[1]) == 10


def test_a_run_stopped_while_it_assembled_needs_no_reward(tmp_path, reward, relabel, monkeypatch):
    fields = dict(dataset_name=write_pairs(tmp_path / "pairs.jsonl"), reward_model_path=reward, output_dir=tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(relabel_with_rm.ExistingPairs, "row", lambda self, label: (_ for _ in ()).throw(KeyboardInterrupt))
        relabel(**fields)
    assert "10 pairs" in relabel(**fields)
    assert calls(tmp_path) == [20]


def test_only_settings_that_change_the_result_are_held_to(tmp_path, reward, relabel):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    fields = dict(dataset_name=pairs, reward_model_path=reward, chunk_size=4, output_dir=tmp_path / "out")
    (tmp_path / "trouble").write_text("3 raise")
    with pytest.raises(KeyError):
        relabel(**fields)
    others = dict(
        dataset_name=write_pairs(tmp_path / "other.jsonl", 12),
        reward_model_path=reward.replace("letters", "Path"),
        chunk_size=5,
        max_train_samples=9,
        prompt_column="chosen",
        rejected_column="chosen",
        prompt_template="{prompt}:",
    )
    for name, value in others.items():
        for dry_run in (False, True):
            with pytest.raises(UserError, match=rf"^{name}: .*out\.part' were made"):
                relabel(**fields | {name: value}, dry_run=dry_run)
    text = pairs.read_text()
    write_pairs(pairs, 11)
    with pytest.raises(UserError, match="^number of rows: 11 now, 10 when"):
        relabel(**fields)
    pairs.write_text(text.replace("p0", "q0"))
    with pytest.raises(UserError, match="^content of the rows: "):
        relabel(**fields)
    pairs.write_text(text)  # younger, but the same
    assert "10 pairs" in relabel(**fields, reward_batch_size=3, seed=9, temperature=0.1, vllm_gpu_memory_utilization=0.5)


def test_a_dry_run_leaves_the_hub_alone_and_makes_nothing(tmp_path, reward, relabel):
    fields = dict(reward_model_path=reward, output_dir=tmp_path / "out")
    assert "train: someone/pairs on the hub, read when the run starts" in relabel(dataset_name="someone/pairs", dry_run=True, **fields)
    assert "train: 10 rows of " in relabel(dataset_name=write_pairs(tmp_path / "pairs.jsonl"), dry_run=True, **fields)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "reward.py"]


def test_columns_keep_their_types_and_those_that_change_places_share_one(tmp_path, reward, relabel):
    """A column null on one side, integers against floats, and what JSON has no word for."""
    turns = [{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "aa"}]
    rows = [
        {"prompt": "p", "chosen": turns[i % 2], "rejected": turns[1 - i % 2], "chosen_by": f"m{i}", "rejected_by": None, "note": None,
         "chosen_rating": i, "rejected_rating": i + 0.5, "chosen_tags": [], "rejected_tags": ["t"], "when": datetime(2026, 1, i + 1)}
        for i in range(4)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    relabel(dataset_name=tmp_path / "pairs.parquet", reward_model_path=reward, chunk_size=1, output_dir=tmp_path / "out")
    features, made = rows_of(tmp_path / "out")
    assert features["chosen_by"] == features["rejected_by"] == Value("string")
    assert features["chosen_rating"] == features["rejected_rating"] == features["score_chosen"] == Value("float64")
    assert features["chosen_tags"] == features["rejected_tags"] == List(Value("string"))
    assert features["note"] == Value("null")
    for i, row in enumerate(made):
        mine, other = ("rejected", "chosen") if i % 2 == 0 else ("chosen", "rejected")
        assert row["chosen"] == turns[1] and row["rejected"] == turns[0] and row["score_chosen"] > row["score_rejected"]
        assert (row[f"{mine}_by"], row[f"{other}_by"]) == (f"m{i}", None)
        assert (row[f"{mine}_rating"], row[f"{other}_rating"]) == (i, i + 0.5)
        assert (row[f"{mine}_tags"], row[f"{other}_tags"]) == ([], ["t"])
        assert row["when"] == datetime(2026, 1, i + 1)


def test_rows_that_would_fail_late_are_refused_at_once(tmp_path, reward, relabel):
    path = tmp_path / "pairs.jsonl"
    fields = dict(dataset_name=path, reward_model_path=reward, output_dir=tmp_path / "out")
    path.write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n{"prompt": "p", "chosen": null, "rejected": "b"}\n')
    with pytest.raises(UserError, match="column 'chosen' is null in 1 of 2 rows"):
        relabel(**fields)
    path.write_text('{"prompt": "p", "chosen": "a", "rejected": "b", "chosen_id": 1, "rejected_id": "x"}\n')
    with pytest.raises(UserError, match="column 'chosen_id' changes places with one of another type"):
        relabel(**fields)
    assert not (tmp_path / "calls").exists()


def test_a_reward_model_gets_a_chunks_samples_by_length(tmp_path, tokenizer, relabel, monkeypatch):
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **settings)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    rows = [{"prompt": row["text"], "chosen": row["answer"] * (1 + i % 5), "rejected": " a" * (i % 7)} for i, row in enumerate(sentences())]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    batches, forward = [], RewardModel.forward
    with monkeypatch.context() as patch:
        patch.setattr(RewardModel, "forward", lambda self, ids: (batches.append(sorted(map(len, ids))), forward(self, ids))[1])
        fields = dict(dataset_name=tmp_path / "pairs.jsonl", reward_model_path=tmp_path / "rm", output_dir=tmp_path / "out")
        relabel(**fields, chunk_size=30, reward_batch_size=8)
    assert [len(batch) for batch in batches] == [8] * 7 + [4] + [8] * 4 + [4]  # 30 and 18 pairs
    for chunk in (batches[:8], batches[8:]):
        lengths = [length for batch in chunk for length in batch]
        assert lengths == sorted(lengths) and lengths[0] < lengths[-1]

    model = RewardModel(str(tmp_path / "rm"))
    for row, made in zip(rows, rows_of(tmp_path / "out")[1], strict=True):
        scores = {side: model([relabel_with_rm.Sample(row["prompt"], row[side])]).item() for side in ("chosen", "rejected")}
        better = max(scores, key=scores.get)
        assert made["chosen"] == row[better] and made["prompt"] == row["prompt"]
        assert made["score_chosen"] == pytest.approx(scores[better], abs=1e-5)
        assert made["score_rejected"] == pytest.approx(min(scores.values()), abs=1e-5)


# -- made pairs -------------------------------------------------------------------------------------------------------------------


def test_made_pairs_are_the_same_after_a_stop(tmp_path, reward, relabel, model_folder, prompts_file):
    fields = dict(
        dataset_name=prompts_file, prompt_column="text", model_name_or_path=model_folder, generator="hf", reward_model_path=reward,
        num_generations=3, response_length=6, max_prompt_length=16, missing_eos_penalty=0.5, chunk_size=10,
    )  # fmt: skip
    printed = relabel(**fields, output_dir=tmp_path / "whole").replace("whole", "cut")
    features, whole = rows_of(tmp_path / "whole")
    assert 0 < len(whole) < sum(calls(tmp_path)) // 3 < 48  # some prompts tie, some are too long
    assert features == {
        **dict.fromkeys(("text", "answer", "topic", "prompt", "chosen", "rejected"), Value("string")),
        **dict.fromkeys(("score_chosen", "score_rejected"), Value("float64")),
    }
    wanted = calls(tmp_path)
    (tmp_path / "calls").unlink()

    (tmp_path / "trouble").write_text("2 raise")
    with pytest.raises(KeyError):
        relabel(**fields, output_dir=tmp_path / "cut")
    with pytest.raises(UserError, match="^seed: 2 now, 1 when"):
        relabel(**fields, seed=2, output_dir=tmp_path / "cut")
    with pytest.raises(UserError, match=r"^temperature: 0\.1 now, 0\.7 when"):
        relabel(**fields, temperature=0.1, output_dir=tmp_path / "cut")
    assert relabel(**fields, output_dir=tmp_path / "cut") == printed
    assert calls(tmp_path) == [*wanted[:2], *wanted[1:]]
    assert rows_of(tmp_path / "cut") == (features, whole)
