"""Trackers through Accelerate: wandb, TensorBoard, Trackio. One run in a tracker is one run here, its evaluation included."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator

from async_rlhf.config import RunConfig, UserError


def wanted(report_to: str | Sequence[str]) -> list[str]:
    return [name for name in ([report_to] if isinstance(report_to, str) else report_to) if name != "none"]


def export_identity(config: RunConfig) -> None:
    """Tell the trackers which run this is, for TRL's trainers, which open them: wandb by its environment, Trackio by the name."""
    if "trackio" in wanted(config.report_to):
        config.run_name = config.wandb_run_id
    if "wandb" in wanted(config.report_to):
        os.environ |= {"WANDB_PROJECT": config.project, "WANDB_RUN_ID": config.wandb_run_id, "WANDB_RESUME": "allow"}


def open_trackers(accelerator: Accelerator, settings: Mapping[str, Any], resume: bool = False) -> None:
    """Start the run named by `settings` (a run's fields `project`, `run_name`, `wandb_run_id`) in every tracker of the accelerator,
    or take it up again.

    Raises:
        UserError: a tracker refuses, for want of a key, say.
    """
    plain = {key: value for key, value in settings.items() if isinstance(value, int | float | str | bool)}
    kwargs = {
        "wandb": {"name": settings["run_name"], "id": settings["wandb_run_id"], "resume": "allow"},
        "trackio": {"name": settings["wandb_run_id"], "resume": "allow" if resume else "never", "embed": False},
    }
    try:
        accelerator.init_trackers(settings["project"], None if resume else plain, kwargs)
    except Exception as error:  # each tracker has its own kinds: no key, no server
        names, message = ", ".join(map(str, accelerator.log_with)), " ".join(str(error).split())
        raise UserError(f"report_to {names}: {message} (WANDB_MODE=offline logs without a server)") from error
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":  # its own step may not go back: what belongs to an earlier update names its step
            tracker.run.define_metric("gold/*", step_metric="step")


def log_table(accelerator: Accelerator, name: str, rows: Sequence[Mapping[str, Any]], step: int, past: bool = False) -> None:
    """Show rows (all with the same keys) as a table, in each tracker's own way. `past`: the run has left the step behind."""
    columns = list(rows[0])
    data = [[row[column] for column in columns] for row in rows]
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log_table(name, columns, data, step=None if past else step)
        elif tracker.name == "trackio":
            import pandas
            import trackio

            tracker.log({name: trackio.Table(dataframe=pandas.DataFrame(data, columns=columns))}, step=step)
        elif tracker.name == "tensorboard":
            tracker.writer.add_text(name, _markdown(columns, data), step)


def log(accelerator: Accelerator, values: Mapping[str, Any], step: int) -> None:
    """Log at a step that is not past."""
    for tracker in accelerator.trackers:
        reserved = {"step"} if tracker.name == "trackio" else set()  # trackio keeps that name for itself
        tracker.log({name: value for name, value in values.items() if name not in reserved}, step=step)


def log_past(accelerator: Accelerator, values: Mapping[str, Any], step: int) -> None:
    """Log what belongs to an update that the run has left behind."""
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log({**values, "step": step})
        else:
            tracker.log(dict(values), step=step)


def _markdown(columns: Sequence[str], data: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        return str(value).replace("|", "\\|").replace("\n", "<br>")

    lines = [columns, ["---"] * len(columns), *data]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
