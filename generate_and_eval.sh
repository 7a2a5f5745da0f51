#!/usr/bin/env bash
#SBATCH --job-name=async_rlhf_eval
#SBATCH --output=slurm-%j.out
#SBATCH --time=8:00:00
#SBATCH --nodes=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#
# Evaluate a run: ./generate_and_eval.sh FLAGS…; the flags reach generate_for_eval.py and load_and_eval.py, and each takes its own.
#
#     ./generate_and_eval.sh --model_name_or_path results/onlinedpo_pythia2.8b_multigpu --torch_dtype bfloat16
#
# Config files, data and model names come from the run's own files unless a flag names others. The exit code is that of the step
# that failed.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/slurm_step.sh ]] || here=${SLURM_SUBMIT_DIR:-$here}
# shellcheck source=slurm_step.sh
source "$here/slurm_step.sh"

step python "$project/generate_for_eval.py" "$@"
step python "$project/load_and_eval.py" "$@"
