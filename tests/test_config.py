import dataclasses

import pytest

from async_rlhf.config import BatchPlan, RLConfig, UserError, parse
from online_dpo import OnlineDPOConfig


def test_command_line_wins_over_yaml_in_both_spellings(tmp_path):
    file = tmp_path / "c.yml"
    file.write_text("learning_rate: 3e-6\nbf16: true\nreport_to: [none]\nmissing_eos_penalty: null\nmax_staleness: 2\n")
    config = parse(OnlineDPOConfig, ["--config", str(file), "--max_staleness=3", "--beta", "0.2", "--missing_eos_score=-1"])
    assert (config.learning_rate, config.bf16, config.report_to) == (3e-6, True, ["none"])
    assert (config.max_staleness, config.beta, config.missing_eos_score, config.missing_eos_penalty) == (3, 0.2, -1.0, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rte", "1"], "unknown field 'learning_rte'; did you mean 'learning_rate'?"),
        (["--learning_rte=1"], "unknown field 'learning_rte'; did you mean 'learning_rate'?"),
        (["--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["--weight_update", "latest"], "invalid choice: 'latest'"),
        (["stray"], "'stray' stands alone"),
        (["--config", "absent.yml"], "absent.yml: no such file"),
        (["--num_generations", "1", "--per_device_train_batch_size", "4"], "a pair needs at least 2"),
        (["--per_device_train_batch_size", "5"], "no multiple of num_generations 2"),
        (["--max_staleness", "-1"], "max_staleness -1"),
        (["--temperature", "0"], "temperature"),
        (["--missing_eos_penalty", "1", "--missing_eos_score", "-1"], "exclude each other"),
        (["--generator", "replay"], "replay_path"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(arguments, message):
    with pytest.raises(UserError, match=".*") as caught:
        parse(OnlineDPOConfig, arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_and_an_empty_list_in_a_file(tmp_path):
    file = tmp_path / "c.yml"
    file.write_text("stop_token_ids: []\nmissing_eos_penalty: null\n")
    config = parse(OnlineDPOConfig, ["--config", str(file)])
    assert config.stop_token_ids == [] and config.missing_eos_penalty is None
    file.write_text("temperature: null\n")
    with pytest.raises(UserError, match="temperature: null is no value of it"):
        parse(OnlineDPOConfig, ["--config", str(file)])


def test_an_adapters_reference_is_its_base():
    parse(OnlineDPOConfig, ["--use_peft", "--model_name_or_path", "a", "--sft_model_path", "a"])
    with pytest.raises(UserError, match="sft_model_path 'b': with use_peft the reference is model_name_or_path"):
        parse(OnlineDPOConfig, ["--use_peft", "--model_name_or_path", "a", "--sft_model_path", "b"])


def test_unknown_key_in_a_file_names_the_file(tmp_path):
    file = tmp_path / "c.yml"
    file.write_text("max_stalenes: 1\n")
    with pytest.raises(UserError, match=r"c.yml: unknown field 'max_stalenes'; did you mean 'max_staleness'\?"):
        parse(OnlineDPOConfig, ["--config", str(file)])


def test_trust_remote_code_is_off():
    assert parse(OnlineDPOConfig, []).trust_remote_code is False


def test_every_field_has_a_help_string_and_help_prints(capsys):
    for field in dataclasses.fields(OnlineDPOConfig):
        assert len(field.metadata.get("help", "")) > 10, field.name
    with pytest.raises(SystemExit):
        parse(OnlineDPOConfig, ["--help"])
    assert "--max_staleness" in capsys.readouterr().out


def test_mini_batches_and_epochs_multiply_optimizer_steps():
    config = RLConfig(per_device_train_batch_size=4, num_mini_batches=4, num_ppo_epochs=2, total_episodes=100, max_staleness=2)
    plan = BatchPlan.of(config, processes=1)
    assert (plan.completions, plan.prompts, plan.updates, plan.optimizer_steps) == (16, 8, 7, 56)
    assert "so 16 to 23 optimizer steps" in plan.describe(config)


@pytest.mark.parametrize(
    ("save_steps", "expected"), [(0.25, [2, 4, 6, 8, 9]), (4, [4, 8, 9]), (9, [9]), (100, [9]), (0.01, list(range(1, 10)))]
)
def test_saves_are_regular_and_include_the_last_update(save_steps, expected):
    plan = BatchPlan.of(RLConfig(per_device_train_batch_size=2, total_episodes=18), processes=1)
    assert plan.updates == 9
    assert plan.saves(save_steps) == expected


def test_user_error_exits_with_2_and_one_line(run_script):
    done = run_script("online_dpo.py", "--model_name_or_path", "./absent", code=2)
    assert done.stderr.strip().splitlines()[-1].startswith("error: model_name_or_path './absent'")
    assert "Traceback" not in done.stderr
