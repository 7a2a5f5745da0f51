#!/usr/bin/env bash
#SBATCH --job-name=async_rlhf
#SBATCH --output=slurm-%j.out
#SBATCH --time=24:00:00
#SBATCH --nodes=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=16
#SBATCH --mem=128G
#
# Train: ./train.sh COMMAND…, in a shell, or sbatch [options] train.sh COMMAND… under Slurm, submitted from the project's folder.
#
#     ./train.sh python online_dpo.py --config configs/onlinedpo_tiny.yml
#     sbatch train.sh accelerate launch --config_file configs/deepspeed_zero2.yaml --num_processes 3 \
#         online_dpo.py --config configs/onlinedpo_pythia410m_tldr_vllm_bf16_4gpu.yml --wandb_run_id slurm
#
# The link output_dir leads to the results. The exit code is the command's.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/slurm_step.sh ]] || here=${SLURM_SUBMIT_DIR:-$here}
# shellcheck source=slurm_step.sh
source "$here/slurm_step.sh"

if [[ $# -eq 0 ]]; then
    echo "usage: $0 COMMAND…, for example: $0 python online_dpo.py --config configs/onlinedpo_tiny.yml" >&2
    exit 2
fi
step "$@"
