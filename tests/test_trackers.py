"""One run in wandb (offline), TensorBoard and Trackio: training, a table of completions, and gold/* at the right updates."""

import importlib
import struct
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import settings

from async_rlhf.runs import place_run
from async_rlhf.trainer import Trainer
from online_dpo import OnlineDPO

UPDATES = 4


@pytest.fixture(scope="module")
def tracked(work, model_folder, prompts_file, reward_file):
    """A run of four updates with two checkpoints, and its evaluation: as two scripts would, through the same functions."""
    import generate_for_eval
    import load_and_eval

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(work))
        patch.setenv("WANDB_SILENT", "true")
        patch.chdir(work)
        trackio_folder(patch, work / "trackio")
        config = settings(
            model_folder, prompts_file, reward_file, work / "tracked", report_to=["wandb", "tensorboard", "trackio"],
            eval_steps=2, eval_split="train[:5]", save_steps=2,
        )  # fmt: skip
        place_run(config)
        Trainer(config, OnlineDPO(config)).run()
        flags = [
            "script",
            "--model_name_or_path",
            config.output_dir,
            "--generator",
            "hf",
            "--max_eval_samples",
            "6",
            "--sample_sft",
            "true",
        ]
        flags += ["--completion_column", "answer", "--gold_reward_model_path", f"{reward_file}:letters", "--bootstrap_samples", "10"]
        for script in (generate_for_eval, load_and_eval):
            patch.setattr("sys.argv", flags)
            script.main()
        yield config


def trackio_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Trackio reads its folder when it is imported, into several modules."""
    import trackio

    folder.mkdir()
    for name in ("utils", "sqlite_storage", "bucket_storage"):
        module = importlib.import_module(f"trackio.{name}")
        for variable, value in {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media"}.items():
            if hasattr(module, variable):
                patch.setattr(module, variable, value)
    patch.setattr(trackio, "TRACKIO_DIR", folder)


def test_tensorboard_has_each_name_at_its_updates(tracked):
    events = EventAccumulator(str(Path(tracked.output_dir) / "async_rlhf"))
    events.Reload()
    steps = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert steps["loss/policy"] == steps["objective/score"] == [1, 2, 3, 4]
    assert steps["gold/score"] == steps["gold/win_rate"] == steps["gold/score_gain"] == [2, 4]
    assert steps["eval/score"][-1] == UPDATES
    assert {"eval/completions/text_summary", "gold/samples/text_summary"} <= set(events.Tags()["tensors"])


def test_trackio_takes_the_run_up_again(tracked):
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("async_rlhf") == [tracked.wandb_run_id]
    logs = SQLiteStorage.get_logs("async_rlhf", tracked.wandb_run_id)
    assert [log["step"] for log in logs if "gold/score" in log] == [2, 4]
    assert [log["step"] for log in logs if "loss/policy" in log] == [1, 2, 3, 4]
    assert any("gold/samples" in log for log in logs) and any("eval/completions" in log for log in logs)


def test_wandb_has_one_run_and_gold_scores_name_their_update(tracked):
    """Two offline records of one id: the second holds gold/* with the update as `step`, which is its axis."""
    first, second = map(read_wandb, wandb_files(tracked))
    assert first["id"] == second["id"] == tracked.wandb_run_id
    losses = [row for row in first["history"] if "loss/policy" in row]
    assert [row["step"] for row in losses] == ["1", "2", "3", "4"] and losses[0]["episode"] == "16"
    gold = [row for row in second["history"] if "gold/score" in row]
    assert [(row["step"], row["episode"]) for row in gold] == [("2", "32"), ("4", "64")]
    assert ("gold/*", "step") in second["metrics"]
    assert any("eval/completions/nrows" in row for row in first["history"])
    assert [row["step"] for row in second["history"] if "gold/samples/nrows" in row] == ["2", "4"]


def wandb_files(config) -> list[Path]:
    return sorted(Path(config.output_dir).parent.glob(f"wandb/offline-run-*-{config.wandb_run_id}/*.wandb"))


def read_wandb(path: Path) -> dict:
    """An offline record: a log of protobuf messages in blocks of 32 KiB, each chunk behind 7 bytes (crc, length, type)."""
    from wandb.proto import wandb_internal_pb2

    data, at, message = path.read_bytes(), 7, b""
    found = {"id": None, "history": [], "metrics": set()}
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message = message + data[at + 7 : at + 7 + length] if kind in (3, 4) else data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # whole, or the last of several
            continue
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.WhichOneof("record_type") == "history":
            found["history"].append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
        elif record.WhichOneof("record_type") == "run":
            found["id"] = record.run.run_id
        elif record.WhichOneof("record_type") == "metric":
            found["metrics"].add((record.metric.glob_name, record.metric.step_metric))
    return found


def test_a_tracker_that_refuses_is_one_error_before_any_model_is_loaded(model_folder, prompts_file, reward_file, tmp_path, run_script):
    nobody = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    done = run_script(
        "online_dpo.py", f"--dataset_name={prompts_file}", "--prompt_column=text", f"--model_name_or_path={model_folder}",
        "--report_to=wandb",
        f"--reward_model_path={reward_file}:letters", f"--output_dir={tmp_path / 'run'}", "--generator=hf", "--response_length=6",
        code=2, env=nobody,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: report_to wandb: ") and "wandb login" in last and "WANDB_MODE=offline" in last
    assert not (tmp_path / "run" / "run_config.json").exists()  # the next try finds the folder free
