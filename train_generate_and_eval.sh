#!/usr/bin/env bash
#SBATCH --job-name=async_rlhf
#SBATCH --output=slurm-%j.out
#SBATCH --time=24:00:00
#SBATCH --nodes=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#
# Train, then evaluate what was trained: ./train_generate_and_eval.sh COMMAND…, in a shell or with sbatch.
#
#     ./train_generate_and_eval.sh python online_dpo.py --config configs/onlinedpo_tiny.yml --max_staleness=1
#
# The command tells this wrapper alone where its results are, so that wrappers side by side each evaluate their own run. The exit
# code is that of the step that failed; as for train.sh, 85 says that training stopped, to be continued.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
[[ -f $here/slurm_step.sh ]] || here=${SLURM_SUBMIT_DIR:-$here}
# shellcheck source=slurm_step.sh
source "$here/slurm_step.sh"

links=$(mktemp -d "$PWD/.output_dir.XXXXXXXX")
trap 'rm -rf "$links"' EXIT
export ASYNC_RLHF_OUTPUT_LINK=$links/output_dir

# shellcheck disable=SC2329 # `attended` calls it
told() { kill -USR1 "$attended_pid"; }
attended "$here/train.sh" "$@"

if [[ ! -L $ASYNC_RLHF_OUTPUT_LINK ]]; then
    for word in "$@"; do
        [[ $word != --dry_run && $word != --dry_run=[Tt]rue ]] || exit 0 # a plan leaves nothing to evaluate
    done
    echo "error: '$*' left no results: a training script of this project is needed" >&2
    exit 1
fi
results=$(readlink -f "$ASYNC_RLHF_OUTPUT_LINK")
echo "evaluating $results" >&2
"$here/generate_and_eval.sh" --model_name_or_path "$results"
