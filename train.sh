#!/usr/bin/env bash
#SBATCH --job-name=async_rlhf
#SBATCH --output=slurm-%j.out
#SBATCH --time=24:00:00
#SBATCH --nodes=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=16
#SBATCH --mem=128G
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#
# Train: ./train.sh COMMAND…, in a shell, or sbatch [options] train.sh COMMAND… under Slurm, submitted from the project's folder.
#
#     ./train.sh python online_dpo.py --config configs/onlinedpo_tiny.yml
#     sbatch train.sh accelerate launch --config_file configs/deepspeed_zero2.yaml --num_processes 3 \
#         online_dpo.py --config configs/onlinedpo_pythia410m_tldr_vllm_bf16_4gpu.yml --wandb_run_id slurm
#
# The link output_dir leads to the results. The exit code is the command's; it is 85 where the run was asked to stop (by preemption,
# or five minutes before the time limit) and has saved itself at the end of an update. A Slurm job is then put in the queue again, and
# goes on from there.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/slurm_step.sh ]] || here=${SLURM_SUBMIT_DIR:-$here}
# shellcheck source=slurm_step.sh
source "$here/slurm_step.sh"

if [[ $# -eq 0 ]]; then
    echo "usage: $0 COMMAND…, for example: $0 python online_dpo.py --config configs/onlinedpo_tiny.yml" >&2
    exit 2
fi
command=("$@")
if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 && " $* " =~ (online_dpo|ppo|rloo)\.py' ' && $* != *--resume_from_checkpoint* ]]; then
    command+=(--resume_from_checkpoint latest)
fi

# By files, since a launcher neither passes a signal on to its processes in time nor ends with their exit code.
words=$(mktemp -d "$PWD/.train.XXXXXXXX")
trap 'rm -rf "$words"' EXIT
export ASYNC_RLHF_STOP=$words/stop ASYNC_RLHF_PREEMPTED=$words/preempted
# shellcheck disable=SC2329 # `attended` calls it
told() { touch "$ASYNC_RLHF_STOP"; }
code=0
attended step "${command[@]}" || code=$?
if [[ -s $ASYNC_RLHF_PREEMPTED ]]; then
    code=85
    if [[ -n ${SLURM_JOB_ID:-} ]] && command -v scontrol >/dev/null; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
